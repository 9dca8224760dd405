"""FSDP: its options change where state lies and what is sent, never the run."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit import small
from kit.runs import differences, recorded, recorded_all
from kit.worlds import in_world
from training.test_same_run import config, oracle

import lockstep
from lockstep.checkpoint.local import LocalStorage
from lockstep.loop.session import components_of
from lockstep.resuming.checkpoints import Checkpoints
from lockstep.resuming.resuming import Resume

OPTIONS: dict[str, dict[str, Any]] = {
    "each block": {},
    "the whole model at once": {"wrap": "root"},
    "large modules": {"wrap": "size", "min_num_params": 2_000},
    "modules of a class": {"wrap": ["Attention", "SwiGLU"]},
    "modules inside of others": {"wrap": ["Block", "Attention"]},
    "prefetching forwards": {"forward_prefetch": True},
    "reducing each micro-batch": {"reduce_every": "micro-batch"},
    "grad op, reducing each micro-batch": {"sharding_strategy": "SHARD_GRAD_OP", "reduce_every": "micro-batch"},
}


def fsdp(**options: Any) -> dict[str, Any]:
    return {"strategy": "fsdp", "fsdp": options}


@pytest.mark.parametrize("ranks", [pytest.param(2, marks=pytest.mark.drill), 3])
def test_options_leave_the_run_as_it_is(ranks: int) -> None:
    configs = [config(13, 4, parallel=fsdp(**options)) for options in OPTIONS.values()]
    for name, run in zip(OPTIONS, recorded_all(configs, ranks, updates=2), strict=True):
        assert differences(run, oracle(13, 2)) == [], name


def test_a_parameter_of_fewer_rows_than_ranks_is_sharded_along_another_dim() -> None:
    """Its first dim would be padded: of 8 experts, each of 64 ranks would gather 64."""
    sgd = {"name": "sgd", "lr": 0.1, "momentum": 0.9}
    asked = small.config("FewRows", optim=sgd, parallel=fsdp())
    assert differences(recorded(asked, 4, 3), recorded(small.config("FewRows", optim=sgd), updates=3)) == []
    assert in_world(4, _shape_of_experts, asked) == [(2, 64, 256)] * 4


def test_such_a_parameter_is_resumed_on_other_ranks(tmp_path: Path) -> None:
    """Sharded along its first dim, or whole: the losses that follow are those of the run that wasn't cut."""
    sgd = {"name": "sgd", "lr": 0.1, "momentum": 0.9}
    cut = small.config("FewRows", optim=sgd, parallel=fsdp())
    uncut, *_ = in_world(4, _losses, cut, str(tmp_path), None)
    for ranks, parallel in ((4, fsdp()), (3, fsdp()), (1, {"strategy": "single"})):
        resumed, *_ = in_world(ranks, _losses, {**cut, "parallel": parallel}, str(tmp_path), 2)
        assert resumed == pytest.approx(uncut[2:], rel=1e-6), (ranks, parallel)


def _losses(asked: dict[str, Any], folder: str, step: int | None) -> list[float]:
    """From the checkpoint of a step; without one from the beginning, saving after two updates."""
    with lockstep.session(asked) as session:
        checkpoints = Checkpoints(session, LocalStorage(Path(folder)), {})
        checkpoints.begin(Resume(step=step))
        losses = []
        for report in session:
            losses.append(report.loss)
            if step is None and report.step == 2:
                checkpoints.save()
        assert all(ended.failure is None for ended in checkpoints.finish())
        return losses


def _shape_of_experts(asked: dict[str, Any]) -> tuple[int, ...]:
    with lockstep.session(asked) as session:
        parameters = dict(components_of(session).sharding.state.model.named_parameters())
        return tuple(_local(parameters["experts"]).shape)


# --- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("sharding", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"])
def test_memory_is_what_the_plan_says(sharding: str, ranks: int) -> None:
    model = {"kind": "transformer", "layers": 2, "width": 120, "heads": 4, "vocabulary": 256}
    parallel = {**fsdp(sharding_strategy=sharding), **({"data": 2} if sharding == "HYBRID_SHARD" and ranks > 1 else {})}
    for planned, held in in_world(ranks, _held, config(8, model=model, parallel=parallel)):
        for what in ("parameters", "gradients", "optimizer"):
            assert held[what] == pytest.approx(planned[what], rel=0.05), what


def _held(asked: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes that this rank holds before an update."""
    with lockstep.session(asked) as session:
        batch = next(session.batches())
        session.accumulate(batch)
        placement, sharding = components_of(session).plan.placement, components_of(session).sharding
        parameters = [_local(parameter) for parameter in sharding.state.model.parameters()]
        gradients = [_local(parameter.grad) for parameter in sharding.state.model.parameters()]
        state = sharding.state.live_state().tensors
        optimizer = [_local(value) for name, value in state.items() if name.startswith("optimizer.")]
        found = {"parameters": parameters, "gradients": gradients, "optimizer": optimizer}
        session.commit()
        return (
            {what: getattr(placement, what) for what in found},
            {what: small.bytes_held(tensors) for what, tensors in found.items()},
        )


def _local(tensor: Any) -> Any:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


# --- what a part of a tensor can't have ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        (
            {"parallel": fsdp(cpu_offload=True)},
            "parallel.fsdp.cpu_offload: on the CPU parameters are already; it is for GPUs: leave it out",
        ),
        (
            {"memory": {"activation_offload": "cpu"}},
            "memory.activation_offload: on the CPU activations are already; it is for GPUs: leave it out",
        ),
        (
            {"parallel": fsdp(wrap=["Blck"])},
            "parallel.fsdp.wrap: the model has no module of class Blck; did you mean Block?",
        ),
        (
            {"parallel": {**fsdp(), "data": 2}},
            "parallel.data: fsdp with FULL_SHARD has one replica; leave parallel.data out, or write "
            "parallel.fsdp.sharding_strategy: HYBRID_SHARD",
        ),
        (
            {"parallel": {**fsdp(sharding_strategy="HYBRID_SHARD"), "data": 2, "shard": 2}},
            "parallel: data x shard = 2 x 2 = 4, not 2, the number of ranks. data = 1 gives 2; or start 4 ranks.",
        ),
        (
            {"parallel": {"strategy": "ddp", "shard": 2}},
            "parallel.shard: ddp shards nothing; leave parallel.shard out",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(sections: dict[str, Any], says: str) -> None:
    asked = config(8, **{"parallel": fsdp(), **sections})
    assert in_world(2, small.refusal, asked) == [says, says]


def test_a_single_number_is_refused() -> None:
    asked = small.config("WithScale", parallel=fsdp())
    says = "parallel.strategy: fsdp can't divide scale, a single number; make its shape [1]"
    assert in_world(2, small.refusal, asked) == [says, says]


# --- modules of other kinds -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", ["WithBatchNorm", "WithTies"])
def test_modules_with_buffers_and_shared_weights(net: str) -> None:
    """Of the running means, the first rank's count, as under ddp."""
    run, expected = (
        recorded(small.config(net, parallel=parallel, batch={"global_size": 12}), ranks=2)
        for parallel in (fsdp(wrap=["Linear"]), {"strategy": "ddp"})
    )
    assert differences(run, expected) == []
    assert run.weights.keys() == expected.weights.keys()


def test_frozen_parameters_stay() -> None:
    frozen = {"model": {**config(13)["model"], "freeze": ["embedding.*", "blocks.0.*"]}}
    run = recorded(config(13, parallel=fsdp(), **frozen), ranks=2)
    assert differences(run, recorded(config(13, **frozen))) == []


def test_an_optimizer_of_the_users_gets_whole_parameters() -> None:
    """It may look at their shapes: it is handed DTensors, which know them."""
    for found in in_world(2, _shapes_seen, small.config(parallel=fsdp())):
        assert found == {"inner.weight": (8, 4), "inner.bias": (8,), "head.weight": (3, 8), "head.bias": (3,)}


def _shapes_seen(asked: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    import torch

    def made(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.RMSprop(groups, lr=0.01)

    with lockstep.session(asked, optimizer=made) as session:
        for _ in session:
            if session.progress.steps == 2:
                break
        seen = components_of(session).sharding.state.optimizer.groups
        return {
            name: tuple(one.shape) for group in seen for name, one in zip(group["names"], group["params"], strict=True)
        }


# --- precision ----------------------------------------------------------------------------------------------------

PRECISIONS: dict[str, tuple[dict[str, Any], str]] = {
    "gathered in bf16": ({"param_dtype": "bf16"}, "bf16"),
    "gathered in fp16": ({"param_dtype": "fp16"}, "fp16"),
    "reduced in bf16": ({"param_dtype": "bf16", "reduce_dtype": "bf16"}, "bf16"),
    "outputs in fp32": ({"param_dtype": "bf16", "output_dtype": "fp32", "cast_forward_inputs": False}, "bf16"),
}


@pytest.mark.parametrize("name", PRECISIONS)
def test_precisions_round_as_much_as_they_must(name: str) -> None:
    """Parameters at rest and moments stay in fp32, so that a run doesn't lose what an update is too small to show."""
    mixed, compute = PRECISIONS[name]
    asked = config(16, 4, parallel=fsdp(mixed_precision=mixed), precision={"compute": compute})
    expected = recorded(config(16, precision={"compute": compute}))
    run = recorded(asked, ranks=2)
    assert run.losses == pytest.approx(expected.losses, rel=1e-3)
    assert run.losses != expected.losses
    assert all(value.dtype == np.float32 for value in (*run.weights.values(), *run.gradients[-1].values()))


@pytest.mark.parametrize(
    "mixed", [{"param_dtype": "fp16"}, {"reduce_dtype": "fp16"}, {"param_dtype": "bf16", "output_dtype": "fp16"}]
)
def test_fp16_brings_a_loss_scale(mixed: dict[str, str]) -> None:
    """A gradient too small for fp16 arrives; one too large is discarded and halves the scale."""
    for scaled, norms, verdicts in in_world(2, _faint_and_loud, mixed):
        assert scaled == [65536.0, 65536.0]
        assert norms[0] == pytest.approx(norms[1], rel=0.02)
        assert verdicts == ["OVERFLOW", 32768.0]


def _faint_and_loud(mixed: dict[str, str]) -> tuple[list[float], list[float], list[Any]]:
    with small.in_group():
        asked = small.config(parallel=fsdp(mixed_precision=mixed), optim={"name": "sgd", "lr": 0.01})
        plain = small.config(parallel=fsdp(), optim={"name": "sgd", "lr": 0.01})
        scales, norm = _first_updates(asked, 1e-7)
        loud, _ = _first_updates({**asked, "batch": {"global_size": 2}}, 1e4)
        _, expected = _first_updates(plain, 1e-7)
    return [one.loss_scale for one in scales], [norm, expected], [loud[0].verdict.name, loud[1].loss_scale]


def _first_updates(asked: dict[str, Any], factor: float) -> tuple[list[Any], float]:
    with lockstep.session(asked, objective=small.Times(factor)) as session:
        reports = list(itertools.islice(session, 2))
        return reports, reports[0].grad_norm


def test_buffers_are_cast_by_us() -> None:
    asked = small.config("WithBatchNorm", parallel=fsdp(mixed_precision={"buffer_dtype": "bf16"}))
    for found in in_world(2, _dtypes_of_buffers, asked):
        assert found == {"norm.running_mean": "torch.bfloat16", "norm.running_var": "torch.bfloat16",
                         "norm.num_batches_tracked": "torch.int64"}  # fmt: skip


def _dtypes_of_buffers(asked: dict[str, Any]) -> dict[str, str]:
    with lockstep.session(asked) as session:
        return {name: str(buffer.dtype) for name, buffer in components_of(session).sharding.state.model.named_buffers()}
