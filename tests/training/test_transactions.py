"""An update is a transaction: kept on all ranks, or discarded on all ranks without a trace in weights or state."""

from __future__ import annotations

import dataclasses
import os
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit import small
from kit.chains import TENSOR_PLAN
from kit.failures import fails, gives
from kit.layouts import VARIANTS, is_partitioned
from kit.worlds import in_world

import lockstep
from lockstep.cli.main import main
from lockstep.core.failure_kinds import FailureKind
from lockstep.core.records import StepReport, Verdict
from lockstep.distributed.consensus import DeviceConsensus
from lockstep.loop.readback import Readback
from lockstep.loop.session import Session, components_of
from lockstep.resilience.verdicts import DISCARD_LIMIT

Weights = dict[str, np.ndarray]


def _watched(config: dict[str, Any], objective: Any = None) -> tuple[list[StepReport], list[Weights]]:
    """Each update's report, and the weights before the first and after each."""
    reports = []
    with lockstep.session(config, objective=objective) as session:
        weights = [_whole(session)]
        for report in session:
            reports.append(report)
            weights.append(_whole(session))
    return reports, weights


def _whole(session: Session) -> Weights:
    return {name: value.clone().numpy() for name, value in components_of(session).sharding.state.weights()}


def _same(one: Weights, other: Weights) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one)


STRATEGIES = [
    name
    for name in VARIANTS
    if name not in ("single", "dp") and not any(word in name for word in ("hybrid", "+", "sequence", "context"))
]


def _with_nan(calls: range, only_rank: int | None = None, strategy: str = "") -> tuple[list[StepReport], list[Weights]]:
    here = only_rank is None or os.environ["RANK"] == str(only_rank)
    return _watched(_under(strategy), small.NanAt(calls, here))


def _under(strategy: str, model_of: str = "", **sections: Any) -> dict[str, Any]:
    """A micro-batch an update; what a pipeline cuts has blocks. `model_of`: with another strategy's model."""
    parallel = dict(VARIANTS[strategy]) if strategy else {}
    if strategy == "tensor":
        parallel["tensor_parallel"] = {"plan": TENSOR_PLAN}
    asked = small.config(parallel=parallel, **sections)
    if (model_of or strategy) and is_partitioned(model_of or strategy):
        asked |= {"model": {"kind": "custom", "target": "kit.chains:Chain"}}
        asked |= {"batch": {"global_size": 13, "micro_size": 13}}
    return asked


@pytest.mark.parametrize(
    ("ranks", "only_rank", "strategy"),
    [
        (1, None, ""),
        *((2, only, name) for only in (None, 1) for name in STRATEGIES if only is None or not is_partitioned(name)),
    ],
)
def test_an_update_that_is_not_finite_leaves_no_trace(ranks: int, only_rank: int | None, strategy: str) -> None:
    everywhere = in_world(ranks, _with_nan, range(2, 4), only_rank, strategy)
    for reports, weights in everywhere:
        assert [report.verdict for report in reports] == [Verdict.KEPT] * 2 + [Verdict.NON_FINITE] * 2 + [
            Verdict.KEPT
        ] * 4
        assert [report.discarded for report in reports] == [0, 0, 1, 2, 2, 2, 2, 2]
        assert [report.samples for report in reports] == [13, 26, 39, 40, 53, 66, 79, 80]
        kept = [not _same(before, after) for before, after in pairwise(weights)]
        assert kept == [report.kept for report in reports]
        assert all(np.isfinite(value).all() for value in weights[-1].values())
        assert _same(weights[-1], everywhere[0][1][-1])


def _spoiled(strategy: str, precision: dict[str, Any]) -> list[tuple[list[bool], list[Weights]]]:
    """Updates of a model with batch norm whose inputs are infinite in two of them on one rank, from host and device."""
    sections = {"parallel": dict(VARIANTS[strategy]), "precision": precision}
    asked = small.config("WithBatchNorm", batch={"global_size": 10, "micro_size": 5}, **sections)
    if is_partitioned(strategy):
        asked |= {"model": {"kind": "custom", "target": "kit.chains:WithNorms"}}
    here = os.environ.get("RANK") == "0"
    runs = []
    with small.in_group():
        for on_device in (False, True):
            with lockstep.session(asked) as session:
                session = _as_on_a_gpu(session) if on_device else session
                kept, weights = [], [_whole(session)]
                for batch in session.batches():
                    if here and batch.step in (2, 3):
                        for micro_batch in batch.micro_batches:
                            micro_batch.inputs[0].fill_(np.inf)
                    session.accumulate(batch)
                    kept.append(session.commit().result().kept)
                    weights.append(_whole(session))
                runs.append((kept, weights))
    return runs


@pytest.mark.parametrize(
    ("ranks", "strategy", "compute"),
    [
        (1, "single", "fp32"),
        (1, "single", "fp16"),
        *((2, name, "fp32") for name in ("ddp", "fsdp", "zero2", "pipeline-1f1b")),
    ],
)
def test_batch_norm_forgets_a_discarded_update(ranks: int, strategy: str, compute: str) -> None:
    for runs in in_world(ranks, _spoiled, strategy, {"compute": compute, "loss_scale": {"initial": 4.0}}):
        for kept, weights in runs:
            assert kept == [True, True, False, False, *[True] * 4]
            assert [not _same(before, after) for before, after in pairwise(weights)] == kept
            assert any("running_mean" in name for name in weights[0])
            assert all(np.isfinite(value).all() for value in weights[-1].values())
        assert _same(runs[0][1][-1], runs[1][1][-1])


def _with_a_gradient_that_differs(rank: int, factor: float) -> str:
    with lockstep.session(small.config()) as session:
        for batch in session.batches():
            session.accumulate(batch)
            if batch.step == 3 and os.environ["RANK"] == str(rank):
                next(iter(components_of(session).sharding.state.model.parameters())).grad.mul_(factor)
            try:
                session.commit()
            except lockstep.RunFailed as failure:
                return str(failure)
    return "nothing was noticed"


@pytest.mark.parametrize("factor", [1.01, float("nan")])
def test_ranks_whose_gradients_differ_are_stopped_at_the_next_vote(factor: float) -> None:
    for said in in_world(3, _with_a_gradient_that_differs, 1, factor):
        assert gives(said, "step 4", "different gradients")
        named = "rank 1 holds another copy of the training state (model.head.bias, model.head.weight, model.inner.bias"
        assert named in said


def test_optimizer_state_forgets_a_discarded_update() -> None:
    """Momentum that had seen a NaN would be NaN from then on."""
    _, weights = _with_nan(range(1))
    assert _same(weights[0], weights[1])
    assert all(np.isfinite(value).all() for value in weights[-1].values())


def _in_fp16(initial: float, strategy: str, model_of: str = "") -> tuple[list[StepReport], list[Weights]]:
    precision = {"compute": "fp16", "loss_scale": {"initial": initial, "growth_interval": 1000}}
    return _watched(_under(strategy, model_of, precision=precision, run={"steps": 20}))


@cache
def _scales_alone(model_of: str) -> list[float]:
    reports, _ = in_world(1, _in_fp16, 2.0**24, "single", model_of)[0]
    return [report.loss_scale for report in reports]


@pytest.mark.parametrize(("ranks", "strategy"), [(1, "single"), *((2, name) for name in STRATEGIES)])
def test_a_loss_scale_that_overflows_halves_until_it_fits(ranks: int, strategy: str) -> None:
    """On two ranks where it does on one: a mean over ranks takes a loss as many times larger, unless gradients are
    summed."""
    for reports, weights in in_world(ranks, _in_fp16, 2.0**24, strategy):
        kept = [report.kept for report in reports]
        first = kept.index(True)
        assert 1 <= first <= 10
        assert {report.verdict for report in reports} == {Verdict.OVERFLOW, Verdict.KEPT}
        overflows = [kept[:step].count(False) for step in range(len(kept))]
        assert [report.loss_scale for report in reports] == [2.0 ** (24 - halvings) for halvings in overflows]
        assert reports[-1].discarded == kept.count(False)
        assert _same(weights[0], weights[first])
        assert not _same(weights[0], weights[first + 1])
        assert reports[-1].loss < reports[0].loss
        assert [report.loss_scale for report in reports] == _scales_alone("tensor" if is_partitioned(strategy) else "")


@pytest.mark.parametrize("compute", ["fp32", "fp16"])
def test_a_run_that_never_learns_again_gives_up(compute: str) -> None:
    config = small.config(precision={"compute": compute}, run={"steps": DISCARD_LIMIT + 50})
    with lockstep.session(config, objective=small.NanAt(range(3, 1000))) as session:
        model, updates = components_of(session).sharding.state.model, iter(session)
        assert [next(updates).kept for _ in range(3)] == [True] * 3
        before = small.weights(model)
        with fails(lockstep.RunFailed, f"step {DISCARD_LIMIT + 3}", DISCARD_LIMIT, "since step 3"):
            list(updates)
        assert _same(before, small.weights(model))


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_the_state_is_saved_when_a_run_gives_up(strategy: str, tmp_path: Path) -> None:
    ranks = 1 if strategy == "single" else 2
    for outcome in in_world(ranks, _given_up, strategy, tmp_path / "run"):
        assert f"{DISCARD_LIMIT} updates in a row" in outcome
        assert gives(outcome, f"after step {DISCARD_LIMIT + 3} is saved in {tmp_path / 'run' / 'checkpoints'}")
    assert main(["ckpt", "audit", str(tmp_path / "run")]) == 0


def _given_up(strategy: str, folder: Path) -> str:
    run = {"steps": DISCARD_LIMIT + 50, "folder": str(folder)}
    config = small.config(parallel={"strategy": strategy}, run=run, batch={"global_size": 13})
    with pytest.raises(lockstep.RunFailed) as raised:
        lockstep.train(config, objective=small.NanAt(range(3, 1000)))
    return "\n".join([str(raised.value), *getattr(raised.value, "__notes__", ())])


def test_a_run_of_which_no_update_was_kept_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each discarded update is printed once, also if its one micro-batch names no other suspects."""
    run = {"steps": 5, "folder": str(tmp_path / "run")}
    with fails(lockstep.RunFailed, "all 5", "loss", kind=FailureKind.NOTHING_LEARNED) as raised:
        lockstep.train(small.config(run=run), objective=small.NanAt(range(1000)))
    assert raised.value.exit_code == 1
    assert not hasattr(raised.value, "__notes__")
    assert not (tmp_path / "run" / "summary.json").exists()
    capsys.readouterr()
    kept_one = {"steps": 5, "folder": str(tmp_path / "other")}
    assert lockstep.train(small.config(run=kept_one), objective=small.NanAt(range(4))).summary["discarded"] == 4
    about = [line.partition(":")[2] for line in capsys.readouterr().out.splitlines() if ", discarded: " in line]
    assert [line.partition(":")[0] for line in about] == [f" update {step}, discarded" for step in range(1, 5)]


# --- numbers that stay on the device ------------------------------------------------------------------------------


def _on_both_paths(config: dict[str, Any]) -> tuple[Any, Any]:
    with small.in_group():
        return _through(config, device=False), _through(config, device=True)


def _through(config: dict[str, Any], *, device: bool) -> tuple[list[StepReport], list[StepReport], Weights]:
    """The reports of each commit, those of the iteration, and the weights at the end of both."""
    committed, weights = [], []
    for iterate in (False, True):
        with lockstep.session(config, objective=small.NanAt(range(2, 3))) as session:
            if device:
                session = _as_on_a_gpu(session)
            if iterate:
                iterated = list(session)
            else:
                for batch in session.batches():
                    session.accumulate(batch)
                    pending = session.commit()
                    committed.append(pending.result())
                    assert pending.result() is committed[-1]
            weights.append(small.weights(components_of(session).sharding.state.model))
    assert _same(*weights)
    return committed, iterated, weights[0]


def _as_on_a_gpu(session: Session) -> Session:
    device = components_of(session).world.device
    components = components_of(session)
    consensus = DeviceConsensus(components.world.axis, device)
    late = dataclasses.replace(components.update, consensus=consensus, readback=Readback(device, late=True))
    return Session(dataclasses.replace(components, update=late))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("compute", ["fp32", "fp16"])
def test_commit_and_iteration_report_the_same_with_numbers_on_the_device(ranks: int, compute: str) -> None:
    precision = {"compute": compute, "loss_scale": {"growth_interval": 3}}
    config = small.config(precision=precision, batch={"global_size": 13})
    for host, late in in_world(ranks, _on_both_paths, config):
        reports, _, weights = host
        assert {report.kept for report in reports} == {True, False}
        for others in (host[1], *late[:2]):
            assert [_timeless(report) for report in others] == [_timeless(report) for report in reports]
        assert _same(weights, late[2])


def test_iteration_over_a_device_yields_a_report_one_update_late_and_commit_waits_for_its_own() -> None:
    with lockstep.session(small.config()) as opened:
        session = _as_on_a_gpu(opened)
        first = next(iter(session))
        assert (first.step, session.progress.steps) == (1, 2)
    with lockstep.session(small.config()) as opened:
        session = _as_on_a_gpu(opened)
        pending = []
        for batch in session.batches():
            session.accumulate(batch)
            pending.append(session.commit())
        assert [report.result().step for report in pending] == list(range(1, len(pending) + 1))


def _timeless(report: StepReport) -> dict[str, Any]:
    found = dataclasses.asdict(report)
    del found["seconds"]
    return {
        name: pytest.approx(value, rel=1e-6, nan_ok=True) if isinstance(value, float) else value
        for name, value in found.items()
    }
