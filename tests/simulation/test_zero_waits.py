"""ZeRO on the simulated accelerator: no tensor of the wrong device, and the host's waits of an update with reasons."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from kit import small
from torch import nn

from lockstep.assembly.user_objects import UserObjects
from lockstep.config.schema import Config
from lockstep.simulation.ranks import simulated_rank
from lockstep.training.assemble import assemble

if find_spec("deepspeed") is None:  # importing it takes seconds, and its ranks have it
    pytest.skip("deepspeed is not installed", allow_module_level=True)

WAITS = {
    # of the update before, long done
    "report": "Event.synchronize in readback.py:land < readback.py:tokens",
    # DeepSpeed: stage 3 reads gradients after its own stream
    "reduced": "Stream.synchronize in deepspeed.py:_backward",
    # DeepSpeed: after the gather of small parameters
    "gathered": (
        "synchronize in deepspeed.py:_step",
        "synchronize in deepspeed_accelerator.py:synchronize < deepspeed.py:_step",
    ),
    # the host reads gradients that were copied to it
    "offloaded": "Event.synchronize in deepspeed_shards.py:gradients_of",
    # the host updates: it must know whether to, and by what to divide
    "verdict": "item in deepspeed.py:update",
    "divisor": "copy to the host in deepspeed.py:_step",
}
"""The first frames of each wait of the host in an update; all others are faults."""
HOST = ["verdict", "divisor", "report"]
CELLS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "zero0": ({"zero_stage": 0}, ["report"]),
    "zero1": ({"zero_stage": 1}, ["report"]),
    "zero2": ({"zero_stage": 2}, ["report"]),
    "zero3": ({"zero_stage": 3}, ["reduced", "gathered", "report"]),
    "zero1, optimizer offloaded": ({"zero_stage": 1, "offload_optimizer": "cpu"}, ["offloaded", *HOST]),
    "zero2, optimizer offloaded": ({"zero_stage": 2, "offload_optimizer": "cpu"}, ["offloaded", *HOST]),
    "zero3, optimizer offloaded": ({"zero_stage": 3, "offload_optimizer": "cpu"}, ["reduced", "gathered", *HOST]),
    "zero3, both offloaded": (
        {"zero_stage": 3, "offload_optimizer": "cpu", "offload_param": "cpu"}, ["reduced", "gathered", *HOST],
    ),
    "zero3, nothing held whole": (
        {"zero_stage": 3, "config": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}},
        ["reduced", "report"],
    ),
}  # fmt: skip


def waits_of_an_update(options: dict[str, Any], precision: str) -> Iterator[str]:
    """Yield the waits of the sixth update, of two micro-batches on one of four ranks, by the names in `WAITS`."""
    with simulated_rank(0, 4) as rank:
        config = small.config(
            launch={"device": "auto"},
            batch={"global_size": 16, "micro_size": 2},
            precision={"compute": precision},
            parallel={"strategy": "deepspeed", "deepspeed": options},
        )
        session = assemble(Config.model_validate(config), rank.world, UserObjects())
        for batch in session.batches():
            rank.execution.syncs.clear()
            session.accumulate(batch)
            session.commit()
            if session.progress.steps == 6:
                break
        waits = [str(wait) for wait in rank.execution.syncs]
        session.close()
    for wait in waits:
        yield next((name for name, frames in WAITS.items() if wait.startswith(frames)), wait)


@pytest.mark.parametrize(  # only stage 3 gathers in bf16
    ("cell", "precision"), [(cell, "fp32") for cell in CELLS] + [(cell, "bf16") for cell in CELLS if "zero3" in cell]
)
def test_an_update_waits_only_where_it_must(cell: str, precision: str) -> None:
    options, expected = CELLS[cell]
    linear = nn.functional.linear
    assert sorted(set(waits_of_an_update(options, precision))) == sorted(expected)
    assert nn.functional.linear is linear, "DeepSpeed's replacement ends with the simulation"
    assert "LOCAL_RANK" not in os.environ, "what follows is no rank"
