"""Tests a model of your own, as two ranks of eight on an accelerator that isn't there.

Run it:  python on_simulated_accelerator.py
"""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.simulation.sessions import simulated_session

CONFIG = {
    "objective": {"kind": "classification"},
    "parallel": {"strategy": "fsdp"},
    "precision": {"compute": "bf16"},
    "batch": {"global_size": 64, "micro_size": 4},
    "run": {"steps": 3},
}


def waits_of_an_update(rank: int, ranks: int) -> list[str]:
    """Return the points of the last update where the host waits for the accelerator."""
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10))
    data = TensorDataset(torch.randn(256, 32), torch.randint(10, (256,)))
    with simulated_session(CONFIG, rank=rank, ranks=ranks, model=model, train_dataset=data) as (session, simulated):
        for batch in session.batches():
            simulated.execution.syncs.clear()
            session.accumulate(batch)
            session.commit()
        return [str(sync) for sync in simulated.execution.syncs]


if __name__ == "__main__":
    for rank in (0, 7):
        print("\n".join(waits_of_an_update(rank, ranks=8)))
