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
OF_DEEPSPEED = {"zero3": ("deepspeed.py:_backward", "deepspeed.py:_step")}
"""Where DeepSpeed itself waits: for its streams of reductions, and before it gathers parameters."""
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
    assert on_one_gpu(planted) == [False, True, True]


def planted() -> list[bool]:
    acts = [lambda ones: ones.sum(), lambda ones: ones.sum().item(), lambda ones: ones.cpu()]
    seen = []
    for act in acts:
        ones = torch.ones(3, device="cuda")
        with host_waits() as waits:
            act(ones)
        seen.append(bool(waits))
    return seen


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_where_the_simulated_accelerator_has_one(layout: str) -> None:
    wrong = {}
    asked = {name: on_gpus(parallel=asking_for(layout, 1), **sections) for name, sections in OPTIONS.items()}
    real = on_one_gpu(waits_of_an_update, list(asked.values()))
    for name, waits in zip(asked, real, strict=True):
        simulated = one_rank({**asked[name], "launch": {"device": "auto"}}, 0, 1, None)
        expected = {wait.partition(" in ")[2] for wait in simulated.syncs}
        others = {wait for wait in set(waits) - expected if not wait.startswith(OF_DEEPSPEED.get(layout, ()))}
        if simulated.failure or others:
            wrong[name] = (simulated.failure, sorted(others))
    assert wrong == {}
