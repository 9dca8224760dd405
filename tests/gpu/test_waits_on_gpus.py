"""In an update, the host waits for a real GPU only where it waits for the simulated one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu.on_gpus import group, host_waits, on_gpus, on_one_gpu
from kit.layouts import asking_for
from kit.simulated import one_rank

import lockstep

LAYOUTS = ["single", "ddp", "fsdp", "fsdp-grad-op", "zero1", "zero2", "zero3"]
OPTIONS: dict[str, dict[str, Any]] = {
    "bf16": {"precision": {"compute": "bf16"}},
    "fp16": {"precision": {"compute": "fp16"}},
    "checkpointing": {"precision": {"compute": "bf16"}, "memory": {"activation_checkpointing": {"mode": "full"}}},
    "offload": {"precision": {"compute": "bf16"}, "memory": {"activation_offload": "cpu"}},
    "chunked": {"precision": {"compute": "bf16"}, "memory": {"loss_chunk": 17}},
}


def waits_of_an_update(configs: list[dict[str, Any]]) -> list[list[str]]:
    """Of the third update of each."""
    with group():
        return [_waits(config) for config in configs]


def _waits(config: dict[str, Any]) -> list[str]:
    with lockstep.session(config) as session:
        for batch in session.batches():
            with host_waits() as waits:
                session.accumulate(batch)
                session.commit()
            if session.progress.steps == 3:
                break
        torch.cuda.synchronize()
        return waits


def test_a_wait_is_seen() -> None:
    assert on_one_gpu(planted) == 2


def planted() -> int:
    with host_waits() as waits:
        torch.ones(3, device="cuda").sum().item()
        torch.ones(3, device="cuda").cpu()
    return len(waits)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_where_the_simulated_accelerator_has_one(layout: str) -> None:
    wrong = {}
    asked = {name: on_gpus(parallel=asking_for(layout, 1), **sections) for name, sections in OPTIONS.items()}
    real = on_one_gpu(waits_of_an_update, list(asked.values()))
    for name, waits in zip(asked, real, strict=True):
        simulated = one_rank({**asked[name], "launch": {"device": "auto"}}, 0, 1, None)
        expected = {wait.partition(" in ")[2] for wait in simulated.syncs}
        if simulated.failure or set(waits) - expected:
            wrong[name] = (simulated.failure, sorted(set(waits) - expected))
    assert wrong == {}
