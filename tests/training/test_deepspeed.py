"""ZeRO by DeepSpeed: every stage is the single process, forgets what is discarded, and shares its checkpoints."""

from __future__ import annotations

import itertools
import os
import sys
import traceback
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import small
from kit.failures import fails, gives
from kit.runs import differences, record_all, recorded, recorded_all
from kit.worlds import in_world
from torch.utils._python_dispatch import TorchDispatchMode
from training.test_same_run import config, oracle

import lockstep
import lockstep.sharding.deepspeed
from lockstep.checkpoint.local import LocalStorage
from lockstep.core.records import Verdict
from lockstep.distributed.shard_boxes import local_tensor
from lockstep.loop.session import components_of
from lockstep.resuming.checkpoints import Checkpoints
from lockstep.resuming.resuming import Resume
from lockstep.sharding.deepspeed import ZeroStep, import_for

if find_spec("deepspeed") is None:  # importing it takes seconds, and its ranks have it
    pytest.skip("deepspeed is not installed", allow_module_level=True)

STAGES = (0, 1, 2, 3)


def zero(stage: int, **options: Any) -> dict[str, Any]:
    return {"strategy": "deepspeed", "deepspeed": {"zero_stage": stage, **options}}


# --- the same run -------------------------------------------------------------------------------------------------


OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adam": {"name": "adam", "lr": 0.01},
    "sgd": {"name": "sgd", "lr": 0.1, "momentum": 0.0},
    "sgd with momentum": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True},
    "lion": {"name": "lion", "lr": 0.003},
    "a rule of its own for the head": {"lr": 0.01, "rules": [{"match": ["head.*"], "lr_scale": 0.3}]},
}


def test_optimizers_and_their_groups() -> None:
    configs = [small.config(optim=optim) for optim in OPTIMIZERS.values()]
    expected = recorded_all(configs)
    for stage in (1, 2, 3):
        runs = recorded_all([{**one, "parallel": zero(stage)} for one in configs], ranks=2)
        for name, run, alone in zip(OPTIMIZERS, runs, expected, strict=True):
            assert differences(run, alone) == [], (stage, name)
            for parameter, values in alone.weights.items():
                assert run.weights[parameter] == pytest.approx(values, abs=2e-5), (stage, name, parameter)


OPTIONS: dict[str, dict[str, Any]] = {
    "optimizer offloaded, stage 1": zero(1, offload_optimizer="cpu"),
    "optimizer offloaded, stage 2": zero(2, offload_optimizer="cpu"),
    "optimizer offloaded, stage 3": zero(3, offload_optimizer="cpu"),
    "both offloaded": zero(3, offload_optimizer="cpu", offload_param="cpu"),
    "all-reduce in place of reduce-scatter": zero(
        2, config={"zero_optimization": {"stage": 2, "reduce_scatter": False, "contiguous_gradients": False}}
    ),
    "overlapping": zero(2, config={"zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 500}}),
    "nothing held whole": zero(
        3, config={"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "sub_group_size": 4000}}
    ),
}


def test_options_make_the_same_run() -> None:
    configs = [config(13, 4, parallel=parallel) for parallel in OPTIONS.values()]
    for name, run in zip(OPTIONS, recorded_all(configs, ranks=2, updates=2), strict=True):
        assert differences(run, oracle(13, 2)) == [], name


def test_running_means_and_frozen_parameters() -> None:
    batch = {"batch": {"global_size": 10}}
    frozen = small.config(**batch)
    frozen["model"]["freeze"] = ["inner.*"]
    replaced = {"kind": "custom", "target": "kit.chains:Centered", "arguments": {"replaces": True}}
    models = [small.config("WithBatchNorm", **batch), frozen, {**small.config(**batch), "model": replaced}]
    ways = [{"strategy": "ddp"}, *map(zero, STAGES)]
    configs = [{**config, "parallel": way} for config in models for way in ways]
    every = iter(in_world(2, record_all, configs, 4, None)[0])  # of each rank its own running means
    for expected, *runs in zip(*[every] * len(ways), strict=True):
        for stage, run in enumerate(runs):
            assert differences(run, expected) == [], (stage, expected.weights.keys())
            assert run.weights.keys() == expected.weights.keys()


HALF: dict[str, tuple[str, dict[str, Any]]] = {
    "as it is": ("bf16", {}),
    "fp16": ("fp16", {}),
    "gradients larger than a bucket": ("bf16", {"reduce_bucket_size": 500}),
    "one module at a time": ("bf16", {"stage3_max_live_parameters": 0, "stage3_prefetch_bucket_size": 0}),
}


def _in_half_precision(plain: bool) -> list[tuple[list[float], dict[str, Any], dict[torch.dtype, int]]]:
    """Losses, weights and gathered bytes in three updates of stage 3; `plain`: as DeepSpeed gathers, in fp32."""
    if plain:
        lockstep.sharding.deepspeed.gather_in = lambda *arguments: None  # type: ignore[assignment]
    runs = []
    with small.in_group():
        for compute, options in HALF.values():
            whole = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **options}}
            sections = {"precision": {"compute": compute}, "optim": {"name": "sgd", "lr": 0.1}}
            with lockstep.session(config(13, 4, parallel=zero(3, config=whole), **sections)) as session:
                gathered = _Gathered()
                with gathered:
                    losses = [report.loss for report in itertools.islice(session, 2)]
                weights = {name: value.numpy() for name, value in components_of(session).sharding.state.weights()}
            runs.append((losses, weights, gathered.bytes))
    return runs


class _Gathered(TorchDispatchMode):
    """Counts the bytes that are gathered, by dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith("c10d._allgather_base_"):
            self.bytes[args[0].dtype] += args[0].nbytes
        return func(*args, **(kwargs or {}))


def test_stage_3_gathers_in_the_precision_of_autocast_and_trains_the_same_to_the_bit() -> None:
    runs, plain = in_world(2, _in_half_precision, False)[0], in_world(2, _in_half_precision, True)[0]
    for (losses, weights, gathered), (expected, values, in_fp32) in zip(runs, plain, strict=True):
        assert losses == expected
        assert all((weights[name] == values[name]).all() for name in values)
        assert in_fp32.keys() == {torch.float32}
        assert sum(gathered.values()) < 0.6 * in_fp32[torch.float32]


BF16 = {"precision": {"compute": "bf16"}, "optim": {"name": "sgd", "lr": 0.1, "momentum": 0.9}}


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_in_bf16_beside_fp32_masters_make_the_run_of_bf16(stage: int) -> None:
    alone = recorded(config(13, 4, **BF16))
    for options in ({}, {"offload_optimizer": "cpu"}):
        run = recorded(config(13, 4, parallel=zero(stage, bf16_weights=True, **options), **BF16), ranks=2)
        assert run.losses == pytest.approx(alone.losses, rel=2e-3)
        assert run.norms == pytest.approx(alone.norms, rel=2e-2)
        for name, values in alone.weights.items():
            assert run.weights[name].dtype == values.dtype
            assert run.weights[name] == pytest.approx(values, abs=5e-3), name


def test_weights_in_bf16_are_refused_for_frozen_parameters() -> None:
    frozen = config(13, 4, parallel=zero(2, bf16_weights=True), **BF16)
    frozen["model"] = {**frozen["model"], "freeze": ["embedding.*"]}
    message = "parallel.deepspeed.bf16_weights: true would round embedding.weight for good"
    assert all(text.startswith(message) for text in in_world(2, small.refusal, frozen))


# --- the start ----------------------------------------------------------------------------------------------------


STARTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "parameters offloaded": {"offload_param": "cpu", "offload_optimizer": "cpu"},
    "nothing held whole": {"config": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}},
    "weights in bf16": {"bf16_weights": True},
}


def _starts() -> tuple[list[str], bool]:
    """Starts of stage 3 whose parameters are other than ddp's; and whether torch's linear function is restored."""
    linear, different = torch.nn.functional.linear, []
    with small.in_group():
        with lockstep.session(config(13, 4, parallel={"strategy": "ddp"}, **BF16)) as session:
            expected = {name: value.clone() for name, value in components_of(session).sharding.state.weights()}
        for name, options in STARTS.items():
            with lockstep.session(config(13, 4, parallel=zero(3, **options), **BF16)) as session:
                weights = dict(components_of(session).sharding.state.weights())
                if not all(torch.equal(weights[key], value) for key, value in expected.items()):
                    different.append(name)
                if torch.nn.functional.linear is linear:
                    different.append(f"{name}: linear isn't replaced")
    return different, torch.nn.functional.linear is linear


def test_stage_3_starts_from_the_values_of_other_strategies_to_the_bit_and_leaves_torch_as_it_was() -> None:
    assert in_world(2, _starts) == [([], True)] * 2


# --- memory -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(4, marks=pytest.mark.drill)])
def test_memory_is_what_the_plan_says(ranks: int) -> None:
    """Of many small parameters: one that lies across the border of two parts is held whole."""
    model = {"kind": "transformer", "layers": 8 * ranks, "width": 32, "heads": 4, "vocabulary": 256}
    whole = {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}
    stages = [zero(1), zero(2), zero(3) if ranks == 2 else zero(3, config=whole)]
    configs = [config(4 * ranks, 2, model=model, parallel=one) for one in stages]
    for of_rank in in_world(ranks, _held, configs):
        for stage, (planned, held) in enumerate(of_rank, start=1):
            for what in ("parameters", "gradients", "optimizer"):
                assert held[what] == pytest.approx(planned[what], rel=0.05), (stage, what)


def _held(configs: list[dict[str, Any]]) -> list[tuple[dict[str, int], dict[str, int]]]:
    """Bytes on this rank in an update of two micro-batches, as planned and as found."""
    return [_held_by(asked) for asked in configs]


def _held_by(asked: dict[str, Any]) -> tuple[dict[str, int], dict[str, int]]:
    with lockstep.session(asked) as session:
        zero = components_of(session).sharding.step._zero
        parameters: list[Any] = list(components_of(session).sharding.state.model.parameters())
        gradients: list[int] = []

        def look(loss: torch.Tensor) -> None:
            gradients.append(_gradients(zero, parameters))
            open_vote(loss)

        open_vote, session._open_vote = session._open_vote, look  # type: ignore[method-assign]
        session.accumulate(next(session.batches()))
        gradients.append(_gradients(zero, parameters))
        flats = components_of(session).sharding.state.optimizer.flats
        moments = [value for flat in flats for value in zero.optimizer.state[flat].values()]
        found = {
            "parameters": small.bytes_held([held for one in parameters for held in (one.detach(), *_divided(one))]),
            "gradients": max(gradients),
            "optimizer": small.bytes_held([*flats, *moments]),
        }
        placement = components_of(session).plan.placement
        session.commit()
        return {what: getattr(placement, what) for what in found}, found


def _divided(parameter: Any) -> list[Any]:
    return [parameter.ds_tensor] if hasattr(parameter, "ds_tensor") else []


def _gradients(zero: Any, parameters: list[Any]) -> int:
    found = [one.grad for one in parameters if one.grad is not None]
    found += [part for group in zero.averaged_gradients.values() for part in group or ()]
    if hasattr(zero, "grad_partitions_flat_buffer"):
        found.append(zero.grad_partitions_flat_buffer)
    return small.bytes_held(found)


# --- a transaction ------------------------------------------------------------------------------------------------


def _state(session: Any) -> dict[str, bytes]:
    tensors = components_of(session).sharding.state.live_state().tensors
    return {
        name: local_tensor(value).numpy().tobytes()
        for name, value in tensors.items()
        if name.startswith(("model.", "optimizer."))
    }


def _with_a_discarded_update(
    stage: int, options: dict[str, Any], accumulation: int, only_rank: int, on_device: bool = False
) -> dict[str, Any]:
    """States before and after a poisoned update, and after the next one; and that of a run without the poisoned one."""
    if on_device:
        _decide_in_kernels()
    share = -(-12 // int(os.environ["WORLD_SIZE"]))
    batch = {"global_size": 12, "micro_size": -(-share // accumulation)}
    precision = {"compute": "bf16" if options.get("bf16_weights") else "fp32"}
    config = small.config(
        batch=batch, parallel=zero(stage, **options), schedule={"kind": "constant"}, precision=precision
    )
    here = os.environ["RANK"] == str(only_rank)
    found: dict[str, Any] = {}
    with small.in_group():
        calls = range(2 * accumulation, 2 * accumulation + 1)
        with lockstep.session(config, objective=small.NanAt(calls, here)) as session:
            updates = iter(session)
            next(updates), next(updates)
            found["before"] = _state(session)
            found["verdict"] = next(updates).verdict
            found["after"] = _state(session)
            next(updates)
            found["next"] = _state(session)
            engine = components_of(session).sharding.step._engine
            found["steps"] = engine.micro_steps, engine.global_steps
        with lockstep.session(config, objective=small.CrossEntropy()) as session:
            for batch in session.batches():
                if batch.step == 2:  # as if it had not been: nothing is accumulated, nothing committed
                    _pass_over(session)
                    continue
                session.accumulate(batch)
                session.commit()
                if batch.step == 3:
                    break
            found["never"] = _state(session)
    return found


def _decide_in_kernels() -> None:
    """Let the optimizer's kernels skip an update, as on an accelerator, where the host doesn't know."""
    update = ZeroStep.update

    def update_by_tensor(step: Any, rate: float, divisor: Any, keep: Any) -> None:
        update(step, rate, divisor, torch.tensor(bool(keep)))

    ZeroStep.update = update_by_tensor  # type: ignore[method-assign]
    ZeroStep._device_decides = lambda step, keep: True  # type: ignore[method-assign]


def _pass_over(session: Any) -> None:
    """The next batch, as if the update between had been made."""
    upcoming = next(session._batches)
    session._count = float(components_of(session).update.consensus.announce(upcoming.count, upcoming.tokens)[0])
    session.progress = session.progress.advance(session._batch.samples, 0)
    session._batch = upcoming


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(
    ("stage", "options"),
    [
        *((stage, {}) for stage in STAGES),
        *(
            (stage, {option: value})
            for stage in (2, 3)
            for option, value in (("offload_optimizer", "cpu"), ("bf16_weights", True))
        ),
    ],
)
def test_a_discarded_update_leaves_no_bit(stage: int, options: dict[str, Any], accumulation: int) -> None:
    for found in in_world(2, _with_a_discarded_update, stage, options, accumulation, 1):
        assert found["verdict"] is Verdict.NON_FINITE
        assert found["after"] == found["before"]
        assert found["next"] != found["after"]
        assert found["next"] == found["never"]
        if stage > 0:
            assert found["steps"] == (3, 3)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_kernels_skip_a_discarded_update(stage: int) -> None:
    for found in in_world(2, _with_a_discarded_update, stage, {}, 2, 1, True):
        assert found["verdict"] is Verdict.NON_FINITE
        assert found["after"] == found["before"]
        assert found["next"] == found["never"] != found["after"]


class _Reads(TorchDispatchMode):
    """Counts collectives, and the numbers that DeepSpeed's code reads from tensors, by its functions."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if str(func).startswith("c10d"):
            self.counts[str(func)] += 1
        if "_local_scalar_dense" in str(func):
            frames = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename]
            if "site-packages/deepspeed/" in frames[-2].filename:
                self.counts[frames[-2].name] += 1
        return func(*args, **(kwargs or {}))


def _reads_of_an_update(parallels: list[dict[str, Any]]) -> list[dict[str, int]]:
    found = []
    with small.in_group():
        for parallel in parallels:
            with lockstep.session(small.config(batch={"global_size": 12}, parallel=parallel)) as session:
                batches = session.batches()
                for batch in itertools.islice(batches, 3):  # in the first ones stage 3 records what modules use
                    session.accumulate(batch)
                    session.commit()
                reads = _Reads()
                with reads:
                    session.accumulate(next(batches))
                    reads.counts.pop("c10d.allreduce_.default", None)  # of gradients, and of the vote
                    session.commit()
                found.append(dict(reads.counts))
    return found


def test_an_update_reads_and_reduces_no_norm_again() -> None:
    """DeepSpeed's step would, and wait for it; it still reads the constant that stands for the norm."""
    offloaded = [zero(stage, offload_optimizer="cpu") for stage in (2, 3)]
    gathers = "c10d._allgather_base_.default"
    for counts in in_world(2, _reads_of_an_update, [zero(1), zero(2), zero(3), *offloaded])[0]:
        assert counts.pop("is_invalid_grad_norm") == 1
        assert counts.pop("c10d.allreduce_.default") == 1, counts  # the session's norm
        assert {name for name in counts if "reduce_scatter" not in name} == {gathers}, counts


def _in_fp16(stage: int) -> list[tuple[str, float, float]]:
    scale = {"initial": 2.0**24, "growth_interval": 1000}
    precision = {"compute": "fp16", "loss_scale": scale}
    with lockstep.session(small.config(precision=precision, parallel=zero(stage), run={"steps": 14})) as session:
        return [(report.verdict.name, report.loss_scale, report.loss) for report in session]


def test_fp16_overflows_are_discarded_as_in_the_single_process() -> None:
    alone = [(verdict, scale) for verdict, scale, _ in in_world(1, _in_fp16_alone)[0]]
    assert {verdict for verdict, _ in alone} == {"OVERFLOW", "KEPT"}
    for stage in STAGES:
        for found in in_world(2, _in_fp16, stage):
            assert [(verdict, scale) for verdict, scale, _ in found] == alone, stage
            assert found[-1][2] < found[0][2]


def _in_fp16_alone() -> list[tuple[str, float, float]]:
    scale = {"initial": 2.0**24, "growth_interval": 1000}
    config = small.config(precision={"compute": "fp16", "loss_scale": scale}, run={"steps": 14})
    with lockstep.session(config) as session:
        return [(report.verdict.name, report.loss_scale, report.loss) for report in session]


# --- checkpoints --------------------------------------------------------------------------------------------------

STEPS, CUT = 8, 4


def _go_on(parallel: dict[str, Any], folder: str, cut: int | None, save: bool) -> dict[str, Any]:
    compute = "bf16" if parallel["deepspeed"].get("bf16_weights") else "fp32"
    asked = config(12, parallel=parallel, schedule={"kind": "constant"}, run={"steps": STEPS}) | {
        "precision": {"compute": compute}
    }
    with lockstep.session(asked) as session:
        checkpoints = Checkpoints(session, LocalStorage(Path(folder)), {})
        checkpoints.begin(Resume(step=cut))
        losses = {}
        for report in session:
            losses[report.step] = report.loss
            if save and report.step == CUT:
                checkpoints.save()
        assert all(ended.failure is None for ended in checkpoints.finish())
        weights = {name: value.clone().numpy() for name, value in components_of(session).sharding.state.weights()}
        return {"losses": losses, "weights": weights, "state": _state(session)}


@pytest.mark.parametrize(
    ("stage", "options"),
    [*((stage, {}) for stage in STAGES), *((stage, {"bf16_weights": True}) for stage in (2, 3))],
)
def test_a_run_goes_on_to_the_bit_under_the_same_stage(tmp_path: Path, stage: int, options: dict[str, Any]) -> None:
    uncut = in_world(2, _go_on, zero(stage, **options), str(tmp_path), None, True)
    cut = in_world(2, _go_on, zero(stage, **options), str(tmp_path), CUT, False)
    for mine, whole in zip(cut, uncut, strict=True):
        assert mine["state"] == whole["state"]


# --- what it refuses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_parameter_without_gradient_is_refused(stage: int) -> None:
    said = in_world(2, small.refusal, small.config("WithSpare", parallel=zero(stage)))
    assert all(one.startswith("model: spare.weight, spare.bias: ") for one in said)


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_optimizers_that_look_at_shapes_are_refused(name: str) -> None:
    said = in_world(2, small.refusal, small.config(optim={"name": name}, parallel=zero(2)))
    (refused,) = set(said)
    assert refused.startswith("optim.name: ")
    assert gives(refused, name, "zero2", "adamw", "parallel.strategy: fsdp")
    expected = recorded(small.config(optim={"name": name}))
    assert differences(recorded(small.config(optim={"name": name}, parallel=zero(0)), ranks=2), expected) == []


def _programs_started(parallel: dict[str, Any]) -> list[str]:
    started: list[str] = []
    sys.addaudithook(lambda event, about: started.append(str(about[0])) if event == "subprocess.Popen" else None)
    record_all([small.config(parallel=parallel)], 2)
    return started


def test_no_rank_starts_a_program() -> None:
    """DeepSpeed's own way asks a compiler about each of its operators, and `numactl` at each gradient."""
    assert in_world(2, _programs_started, zero(3)) == [[], []]


def test_without_deepspeed_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    net = small.Net()
    with fails(lockstep.ConfigError, "pip install 'lockstep-torch[deepspeed]'"):
        import_for(net, torch.device("cpu"))


def test_parameters_in_half_precision_are_refused() -> None:
    net = small.Net().bfloat16()
    with fails(lockstep.ConfigError, "inner.weight", "bfloat16", ".float()"):
        import_for(net, torch.device("cpu"))
