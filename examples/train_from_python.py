"""A complete run from Python, on any number of processes: `python examples/train_from_python.py [RANKS]`."""

from __future__ import annotations

import sys

import torch
from squares import Curve, SquaredError, points

import lockstep


def main(ranks: int) -> None:
    finished = lockstep.train(
        {
            "batch": {"global_size": 50},
            "optim": {"lr": 0.01},
            "run": {"epochs": 5},
            "evaluation": {"every": "2 epochs"},
        },
        model=Curve,
        train_dataset=points(),
        eval_datasets={"sparse": points(101)},
        objective=SquaredError(),
        optimizer=lambda groups: torch.optim.AdamW(groups, betas=(0.9, 0.99)),
        schedule=lambda step, steps: 1 - step / steps,
        ranks=ranks,
    )
    print(finished.folder, finished.summary["evaluation"])


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
