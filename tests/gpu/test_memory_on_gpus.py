"""A GPU holds what `plan` predicts, and the allocator little more."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from gpu.on_gpus import group, on_gpus, on_one_gpu
from kit.layouts import asking_for

import lockstep
from lockstep.assembly.user_objects import UserObjects
from lockstep.config.loading import validate
from lockstep.loop.session import components_of
from lockstep.simulation.memory import MemoryLedger, Peak, Watched, resizes_seen
from lockstep.simulation.updates import peak_of_rank, run_updates

UPDATES = 3
OPTIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": {"compute": "bf16"}},
    "checkpointing": {"precision": {"compute": "bf16"}, "memory": {"activation_checkpointing": {"mode": "full"}}},
    "activation offload": {"precision": {"compute": "bf16"}, "memory": {"activation_offload": "cpu"}},
    "chunked loss": {"precision": {"compute": "bf16"}, "memory": {"loss_chunk": 1024}},
}
MODEL = {"kind": "transformer", "layers": 6, "width": 1024, "heads": 16, "vocabulary": 8192}
DATA = {"train": {"kind": "stdlib-text", "length": 512}}


def asked(layout: str, sections: dict[str, Any]) -> dict[str, Any]:
    base = on_gpus(parallel=asking_for(layout, 1), **sections)
    run = {**base["run"], "steps": 3}
    return {**base, "model": MODEL, "data": DATA, "batch": {"global_size": 16, "micro_size": 8}, "run": run}


def measured(configs: list[dict[str, Any]]) -> list[tuple[Peak, int]]:
    """The tensors' peak of each, and the allocator's."""
    with group():
        return [_measured(config) for config in configs]


def _measured(config: dict[str, Any]) -> tuple[Peak, int]:
    gc.collect()  # the session before has cycles
    before = torch.cuda.memory_allocated()
    with lockstep.session(config) as session:
        ledger = MemoryLedger(components_of(session).world.device.type)
        torch.cuda.reset_peak_memory_stats()
        with Watched(ledger), resizes_seen(ledger):
            run_updates(session, ledger, UPDATES)
        return ledger.peak(), torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("layout", ["single", "ddp", "fsdp", "zero2", "zero3"])
def test_predicted_is_measured(layout: str) -> None:
    configs = {name: asked(layout, sections) for name, sections in OPTIONS.items()}
    rows = dict(zip(configs, on_one_gpu(measured, list(configs.values())), strict=True))
    wrong = {}
    for name, (peak, allocated) in rows.items():
        predicted = peak_of_rank(validate(configs[name]).config, 1, 0, UserObjects(), UPDATES)
        off = {
            category: (size, peak.by_category[category])
            for category, size in predicted.by_category.items()
            if abs(size - peak.by_category[category]) > 0.01 * peak.bytes
        }
        if off or not 0.98 < peak.bytes / predicted.bytes < 1.02 or not 0.98 < allocated / predicted.bytes < 1.15:
            wrong[name] = (predicted.bytes, peak.bytes, allocated, off)
    assert wrong == {}
