"""Buffers that forwards replace by other tensors count like buffers that they change in place."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from kit import small
from kit.chains import TENSOR_PLAN
from kit.failures import gives
from kit.runs import Trajectory, differences, recorded_all
from kit.worlds import in_world
from torch import Tensor, nn

import lockstep
from lockstep.distributed.collectives import waiting_over
from lockstep.distributed.store_exchange import StoreExchange
from lockstep.loop.session import components_of
from lockstep.sharding.buffers import SyncedBuffers


def _config(parallel: dict[str, Any], *, replaces: bool) -> dict[str, Any]:
    batch, optim = {"global_size": 12, "micro_size": 3}, {"name": "sgd", "lr": 0.1}
    model = {"kind": "custom", "target": "kit.chains:Centered", "arguments": {"replaces": replaces}}
    return {**small.config(batch=batch, optim=optim, parallel=parallel), "model": model}


def _assert_same(run: Trajectory, expected: Trajectory) -> None:
    assert differences(run, expected) == []
    for name, values in expected.weights.items():
        np.testing.assert_allclose(run.weights[name], values, atol=1e-6, err_msg=name)


def test_ranks_continue_with_the_first_rank_s() -> None:
    expected = _config({"strategy": "ddp"}, replaces=False)
    ways: list[dict[str, Any]] = [
        {"strategy": "ddp"},
        {"strategy": "ddp", "ddp": {"static_graph": True}},
        {"strategy": "fsdp"},
    ]
    configs = [_config(parallel, replaces=True) for parallel in ways]
    oracle, *runs = recorded_all([expected, *configs], ranks=2, updates=3)
    assert "lift.center" in oracle.weights
    for run in runs:
        _assert_same(run, oracle)


def test_stages_continue_with_the_first_replica_s() -> None:
    parallel = {"strategy": "ddp", "pipeline": 2, "pipeline_parallel": {"schedule": "1f1b"}}
    configs = [_config(parallel, replaces=replaces) for replaces in (False, True)]
    oracle, run = recorded_all(configs, ranks=4, updates=3)
    assert np.abs(oracle.weights["head.center"]).sum() > 0
    _assert_same(run, oracle)


def test_a_module_whose_weight_is_sharded_keeps_the_one_that_it_was_given() -> None:
    parallel = {"strategy": "ddp", "tensor": 2, "tensor_parallel": {"plan": TENSOR_PLAN}}
    batch = {"global_size": 12, "micro_size": 3}
    model = {"kind": "custom", "target": "kit.chains:Counted"}
    (run,) = recorded_all([{**small.config(batch=batch, parallel=parallel), "model": model}], ranks=2, updates=3)
    assert run.weights["lift.forwards"] == 3 * 12 / 3


# --- tensors of another kind --------------------------------------------------------------------------------------


class LateCenter(small.Net):
    """Makes its buffer in its first training forward, of another value on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", None)

    def forward(self, points: Tensor) -> Tensor:
        if self.training and self.center is None:
            self.center = torch.full((4,), 0.1 * (1 + dist.get_rank()))
        return super().forward(points if self.center is None else points - self.center)


def _late(strategy: str) -> list[float]:
    asked = {key: section for key, section in small.config().items() if key != "model"}
    with lockstep.session({**asked, "parallel": {"strategy": strategy}}, model=LateCenter()) as session:
        for report in session:
            if report.step == 2:  # whose forward begins with the first rank's
                break
        center: Any = components_of(session).sharding.state.model.center
        return center.tolist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_buffer_that_a_forward_makes_is_the_first_rank_s(strategy: str) -> None:
    assert in_world(2, _late, strategy) == [pytest.approx([0.1] * 4)] * 2


def _synchronized() -> list[Any]:
    """Return what a rank holds after its buffer was replaced and synchronized, or why it can't be."""
    with small.in_group():
        rank = dist.get_rank()
        module = nn.Module()
        module.register_buffer("center", torch.zeros(4))
        buffers, held = SyncedBuffers(module), []
        whole = torch.arange(8.0) + 10 * rank
        for replacement in (whole[::2], whole[:1].expand(4), whole[:3].bfloat16(), whole[:6].view(2, 3).t(), None):
            module.center = replacement
            buffers.synchronize()
            held.append(None if replacement is None else module.center.tolist())
        module.center = torch.zeros(1 + rank)
        with pytest.raises(lockstep.ConfigError) as refusal:
            buffers.synchronize()
        return [*held, str(refusal.value)]


def test_ranks_must_hold_alike_tensors_of_whatever_kind() -> None:
    results = in_world(2, _synchronized)
    (*held, first), (*_, second) = results
    assert held == results[1][:-1]
    assert held == [[0, 2, 4, 6], [0] * 4, [0, 1, 2], [[0, 3], [1, 4], [2, 5]], None]
    assert gives(first, "float32 [1]", "rank 0")
    assert gives(second, "float32 [2]", "rank 1")


def _replaced_on_one_rank() -> str:
    with small.in_group():
        rank, store = dist.get_rank(), dist.distributed_c10d._get_default_store()
        module = nn.Module()
        module.register_buffer("center", torch.zeros(4))
        buffers = SyncedBuffers(module)
        with waiting_over(StoreExchange(store, rank, 2, wakes=False, timeout=1.0)), contextlib.ExitStack() as stack:
            if rank == 1:
                module.center = torch.zeros(5)
                refusal = stack.enter_context(pytest.raises(lockstep.ConfigError))
                buffers.prepare()
        dist.barrier()
        return str(refusal.value) if rank == 1 else ""


def test_a_rank_that_alone_has_replaced_its_buffer_is_named() -> None:
    message = in_world(2, _replaced_on_one_rank)[1]
    assert gives(message, "float32 [5]", "rank 1", "float32 [4]")
