"""FSDP under autocast gathers in autocast's precision what autocast would cast: the same run in fewer bytes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kit.failures import gives
from kit.runs import record
from kit.small import in_group
from kit.worlds import in_world
from training.test_same_run import config

import lockstep
from lockstep.loop.session import components_of

OPTIONS: dict[str, dict[str, Any]] = {
    "each block": {},
    "from forward to backward": {"fsdp": {"sharding_strategy": "SHARD_GRAD_OP"}},
    "replicas": {"fsdp": {"sharding_strategy": "NO_SHARD"}},
    "the whole model at once, reduced each micro-batch": {"fsdp": {"wrap": "root", "reduce_every": "micro-batch"}},
    "modules that ranks may leave out": {"ddp": {"find_unused_parameters": True}},
}
_QUICK = ("each block", "modules that ranks may leave out")
CHECKPOINTED = {"memory": {"activation_checkpointing": {"mode": "full"}}}


def fsdp(compute: str, param_dtype: str | None, options: dict[str, Any], **sections: Any) -> dict[str, Any]:
    shared = {**options.get("fsdp", {}), "mixed_precision": {"param_dtype": param_dtype}}
    parallel = {**options, "strategy": "fsdp", "fsdp": shared}
    return config(13, 4, precision={"compute": compute}, parallel=parallel, **sections)


def _recorded(pairs: list[list[dict[str, Any]]]) -> list[list[Any]]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return [[record(each, updates=2) for each in pair] for pair in pairs]


def assert_the_same_bits(pairs: list[list[dict[str, Any]]], ranks: int) -> None:
    for lowered, cast in in_world(ranks, _recorded, pairs)[0]:
        assert lowered.losses == cast.losses
        assert lowered.norms == cast.norms
        assert lowered.evaluations == cast.evaluations
        for name, expected in cast.weights.items():
            assert np.array_equal(lowered.weights[name], expected), name


@pytest.mark.parametrize("compute", ["bf16", pytest.param("fp16", marks=pytest.mark.drill)])
def test_the_run_is_that_of_autocast_over_fp32(compute: str) -> None:
    chosen = OPTIONS.values() if compute == "fp16" else [OPTIONS[name] for name in _QUICK]
    pairs = [[fsdp(compute, dtype, options) for dtype in (None, "fp32")] for options in chosen]
    pairs.append([fsdp(compute, dtype, {}, **CHECKPOINTED) for dtype in (None, "fp32")])
    assert_the_same_bits(pairs, ranks=2)


@pytest.mark.parametrize(
    "axes",
    [
        {"data": 2, "fsdp": {"sharding_strategy": "HYBRID_SHARD"}},
        pytest.param({"tensor": 2}, marks=pytest.mark.drill),
        pytest.param({"context": 2}, marks=pytest.mark.drill),
        pytest.param({"pipeline": 2}, marks=pytest.mark.drill),
    ],
)
def test_products_are_those_of_autocast_over_fp32(axes: dict[str, Any]) -> None:
    untested = {"run": {"steps": 8, "allow_untested": True}}
    pair = [fsdp("bf16", dtype, axes, **untested) for dtype in (None, "fp32")]
    assert_the_same_bits([pair], ranks=4)


# --- bytes --------------------------------------------------------------------------------------------------------

WIDE = {
    "model": {"kind": "transformer", "layers": 5, "width": 96, "heads": 4, "vocabulary": 64},
    "batch": {"global_size": 2, "micro_size": 1},
}


def test_bytes_that_are_held_and_gathered() -> None:
    """Autocast over fp32 holds 2 bytes for each parameter until the backward has used it, and gathers 4."""
    spared = {"each block": 0.2, "from forward to backward": 0.6}
    cases = [fsdp("bf16", dtype, OPTIONS[name], **WIDE) for name in spared for dtype in (None, "fp32")]
    measured = in_world(2, _measured, cases)[0]
    for share, lowered, cast in zip(spared.values(), measured[::2], measured[1::2], strict=True):
        assert lowered["gathered"] < 0.51 * cast["gathered"]
        assert lowered["reduced"] == cast["reduced"]  # in fp32
        for what in ("update", "evaluation"):
            assert lowered[what] < cast[what] - share * lowered["parameters"], what


def _measured(configs: list[dict[str, Any]]) -> list[dict[str, int]]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    return [_measure(asked) for asked in configs]


def _measure(asked: dict[str, Any]) -> dict[str, int]:
    from kit.tensors import Tracked

    with lockstep.session(asked) as session:
        for batch in session.batches():
            with Tracked() as update:
                session.accumulate(batch)
                step = session.commit().result().step
            if step == 1:
                break
        components = components_of(session)
        with Tracked() as evaluation:
            components.engine.evaluate(batch.micro_batches[:1])
        parameters = sum(parameter.nbytes for parameter in components.sharding.state.model.parameters())
        return {
            "parameters": parameters,
            "update": update.peak,
            "evaluation": evaluation.peak,
            "gathered": update.sent["_allgather_base_"],
            "reduced": update.sent["_reduce_scatter_base_"],
        }


@pytest.mark.parametrize(
    ("strategy", "checkpointing", "kept"),
    [("single", "none", [True, False]), ("single", "full", [False, False]), ("fsdp", "none", [False, False])],
)
def test_autocast_keeps_casts_only_of_whole_weights_that_a_backward_follows(
    strategy: str, checkpointing: str, kept: list[bool]
) -> None:
    """Before, it kept those of the whole model until the forward ended, also in evaluations."""
    asked = fsdp("bf16", None, {}, memory={"activation_checkpointing": {"mode": checkpointing}})
    assert in_world(1, _kept, {**asked, "parallel": {"strategy": strategy}}) == [[{each} for each in kept]]


def _kept(asked: dict[str, Any]) -> list[set[bool]]:
    """Return whether autocast keeps casts in the forwards of an update, and in those of an evaluation."""
    from torch import is_autocast_cache_enabled, nn

    with in_group(), lockstep.session(asked) as session:
        components, seen = components_of(session), set()
        layer = next(part for part in components.sharding.state.model.modules() if isinstance(part, nn.Linear))
        layer.register_forward_pre_hook(lambda *_: seen.add(is_autocast_cache_enabled()))
        batch = next(session.batches())
        session.accumulate(batch)
        session.commit()
        updated = seen.copy()
        seen.clear()
        components.engine.evaluate(batch.micro_batches[:1])
    return [updated, seen]


# --- forwards outside of autocast ---------------------------------------------------------------------------------


def test_a_forward_outside_of_autocast_is_in_fp32() -> None:
    asked = fsdp("bf16", None, {})
    (alone,) = in_world(1, _outside, {**asked, "parallel": {"strategy": "single"}})
    for outputs, refusal in in_world(2, _outside, asked):
        assert np.allclose(outputs, alone[0], atol=1e-6)
        assert gives(refusal, "under autocast", "outside")


def _outside(asked: dict[str, Any]) -> tuple[Any, str]:
    import torch

    from lockstep.core.errors import RunFailed

    with lockstep.session(asked) as session:
        batch = next(session.batches())
        model = components_of(session).sharding.state.model
        tokens = torch.arange(12).view(1, 12)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            model(tokens)
        with torch.no_grad():
            outputs = model(tokens)
        assert outputs.dtype is torch.float32
        refusal = ""
        session.accumulate(batch)
        session.commit()
        model(tokens)
        try:
            with torch.autocast("cpu", torch.bfloat16):
                model(tokens)
        except RunFailed as error:
            refusal = str(error)
        return outputs.numpy(), refusal
