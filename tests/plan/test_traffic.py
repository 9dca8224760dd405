"""The formulas of bytes sent agree with the collectives of a real update, counted over gloo."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.layouts import STATE_VARIANTS, VARIANTS
from kit.worlds import in_world

from lockstep.config.loading import validate
from lockstep.core.records import DataFacts
from lockstep.loop.session import components_of
from lockstep.models.build import describe_model
from lockstep.plan.placement import traffic, volume_of
from lockstep.strategies.record import Volume

CONFIG = {
    "model": {"kind": "transformer", "layers": 2, "width": 32, "heads": 2, "vocabulary": 256, "tie_embeddings": False},
    "data": {"train": {"kind": "stdlib-text", "length": 16}},
    "batch": {"global_size": 8, "micro_size": 2},
    "precision": {"compute": "fp32"},
    "launch": {"device": "cpu"},
    "run": {"steps": 3},
}
MICRO_BATCHES = 2
NOTHING_KEPT = {
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}
STAGE_3 = {"zero_stage": 3, "config": {"zero_optimization": {"stage": 3, **NOTHING_KEPT}}}
PARALLELS: dict[str, dict[str, Any]] = {
    **{
        name: dict(VARIANTS[name])
        for name in ("ddp", "fsdp", "fsdp-grad-op", "fsdp-no-shard", "zero0", "zero1", "zero2")
    },
    "zero3": {"strategy": "deepspeed", "deepspeed": STAGE_3},
}
NORMS = 16  # bytes that DeepSpeed's own norms may take, in addition to the formula
SHARE = {"allreduce_": 2.0, "_allgather_base_": 1.0, "_reduce_scatter_base_": 1.0, "alltoall_base_": 1.0}


def counted(sections: list[dict[str, Any]]) -> list[tuple[float, int, int]]:
    """Return, for each run: bytes that one rank sends in the third update, of the model, and at its root."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        return [_counted(each) for each in sections]
    finally:
        dist.destroy_process_group()


def _counted(sections: dict[str, Any]) -> tuple[float, int, int]:
    import torch.distributed as dist
    from torch.utils._python_dispatch import TorchDispatchMode

    import lockstep

    sent: Counter[str] = Counter()

    class Counting(TorchDispatchMode):
        """Count the larger side of each collective, which all of its ranks know; votes are float64 and left out."""

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function.namespace == "c10d":
                name = function._schema.name.removeprefix("c10d::")
                sent[name] += max(map(_bytes_of, args))
            return function(*args, **(kwargs or {}))

    with lockstep.session({**CONFIG, **sections}) as session:
        for batch in session.batches():
            with Counting():
                session.accumulate(batch)
                report = session.commit().result()
            if report.step == 2:
                sent.clear()
        names = [(name, value.numel() * 4) for name, value in components_of(session).sharding.state.weights()]
    share = (dist.get_world_size() - 1) / dist.get_world_size()
    total = sum(SHARE[name] * share * size for name, size in sent.items() if size)
    return total, sum(size for _, size in names), sum(size for name, size in names if not name.startswith("blocks."))


def _bytes_of(argument: Any) -> int:
    import torch

    tensors = argument if isinstance(argument, list | tuple) else [argument]
    return sum(
        each.nbytes for each in tensors if isinstance(each, torch.Tensor) and each.dtype in (torch.float32, torch.uint8)
    )


def test_each_strategy_sends_the_bytes_of_the_formula() -> None:
    runs = [(name, {"parallel": parallel}) for name, parallel in PARALLELS.items()]
    runs += [("fsdp", {"parallel": VARIANTS["fsdp"], "optim": {"name": name}}) for name in ("muon", "adafactor")]
    for counts in in_world(2, counted, [sections for _, sections in runs]):
        for (name, sections), (sent, whole, at_root) in zip(runs, counts, strict=True):
            assert whole > at_root > 0
            config = validate({**CONFIG, **sections}).config
            of_optimizer = (
                volume_of(config, describe_model(config.model, DataFacts(1, None)))
                if "optim" in sections
                else Volume(0, 0)
            )
            volume = Volume(whole, whole, at_root, of_optimizer.exchanged, of_optimizer.summed)
            expected = traffic(name, volume, 2, micro_batches=MICRO_BATCHES)
            assert (expected.optimizer > 0) is ("optim" in sections)
            assert sent == pytest.approx(expected.total, abs=NORMS if name.startswith("zero") else 0), sections


SIZES = st.integers(1, 10**12)


@given(SIZES, SIZES, st.integers(1, 64), st.integers(1, 64), st.integers(1, 8))
def test_bytes_of_strategies_compared_with_each_other(
    parameters: int, gradients: int, shards: int, replicas: int, micro_batches: int
) -> None:
    volume = Volume(parameters, gradients, parameters // 2)
    sent = {
        name: traffic(name, volume, shards * replicas, micro_batches=micro_batches, replicas=replicas).total
        for name in STATE_VARIANTS
    }
    assert sent["single"] == sent["dp"] == 0
    assert sent["ddp"] == sent["fsdp-no-shard"] == sent["zero0"]
    assert sent["fsdp"] >= sent["fsdp-grad-op"]
    assert sent["zero1"] <= sent["zero2"]
    on_one_rank = {name: traffic(name, volume, 1, micro_batches=micro_batches).total for name in STATE_VARIANTS}
    assert not any(on_one_rank.values())


@given(SIZES, st.integers(2, 512))
def test_the_volumes_of_the_zero_paper(size: int, ranks: int) -> None:
    """Section 7: with parameters as large as gradients, 2 for data parallelism and 3 for stage 3."""
    volume, unit = Volume(size, size), (ranks - 1) / ranks * size
    for name, units in {"ddp": 2, "zero1": 3, "zero2": 3, "zero3": 3, "fsdp": 3, "fsdp-grad-op": 2}.items():
        assert traffic(name, volume, ranks).total == pytest.approx(units * unit)


@given(SIZES, st.integers(1, 16), st.integers(1, 16))
def test_a_hybrid_of_one_replica_is_fsdp(size: int, shards: int, replicas: int) -> None:
    volume = Volume(size, size)
    assert traffic("fsdp-hybrid", volume, shards) == traffic("fsdp", volume, shards)
    across = traffic("fsdp-hybrid", volume, shards * replicas, replicas=replicas)
    assert across.reduced >= traffic("fsdp", volume, shards).reduced
