"""Bad numbers: spikes are found alike on all ranks and devices."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import small
from kit.failures import gives
from kit.worlds import in_world

import lockstep
from lockstep.core.records import Batch, StepReport, Verdict
from lockstep.distributed.consensus import DeviceConsensus
from lockstep.loop.readback import Readback
from lockstep.loop.session import Session, components_of
from lockstep.resilience.verdicts import Limits, Spikes

_WINDOW = 8
_SPIKE = 14
_STEPS = 18
_STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "zero2": {"strategy": "deepspeed", "deepspeed": {"zero_stage": 2}},
    "pipeline": {"strategy": "ddp", "pipeline": 2},
}


class SpikeAt(small.CrossEntropy):
    """Its loss is far too large in one update, on one rank."""

    def __init__(self, step: int, factor: float = 1e4, here: bool = True) -> None:
        self._step, self._factor, self._here = step, factor, here
        self.calls = 0

    def loss_sum(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        self.calls += 1
        loss = super().loss_sum(outputs, batch)
        return loss * self._factor if self._here and self.calls == self._step else loss


def _config(numbers: dict[str, Any], parallel: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    made = small.config(
        parallel=parallel or {},
        run={"steps": _STEPS},
        optim={"name": "sgd", "lr": 0.01},
        schedule={"kind": "constant"},
        recovery={"restarts": 0, "bad_numbers": {"window": _WINDOW, **numbers}},
        **sections,
    )
    if parallel and "pipeline" in parallel:
        made |= {"model": {"kind": "custom", "target": "kit.chains:Chain"}}
        made |= {"batch": {"global_size": 13, "micro_size": 13}}
    return made


def _under_each_policy(parallel: dict[str, Any] | None) -> dict[str, tuple[list[StepReport], list[str], str]]:
    """For each policy the reports, a text of the weights after each update, and the failure."""
    here = parallel is None or os.environ["RANK"] == "1"
    found = {}
    with small.in_group():
        for policy in ("ignore", "warn", "skip", "stop"):
            reports, weights, failure = [], [], ""
            with lockstep.session(
                _config({"spike": policy}, parallel), objective=SpikeAt(_SPIKE, here=here)
            ) as session:
                try:
                    for report in session:
                        reports.append(report)
                        weights.append(_digest(session))
                except lockstep.RunFailed as error:
                    failure = str(error)
            found[policy] = reports, weights, failure
    return found


def _digest(session: Session) -> str:
    weights = components_of(session).sharding.state.weights()
    return str([(name, float(value.double().sum())) for name, value in weights])


@pytest.mark.parametrize("strategy", ["single", *_STRATEGIES])
def test_each_policy_for_a_spike(strategy: str) -> None:
    ranks = 1 if strategy == "single" else 2
    for found in in_world(ranks, _under_each_policy, _STRATEGIES.get(strategy)):
        reports, _, _ = found["ignore"]
        assert all(report.kept and not report.spike for report in reports)
        reports, weights, _ = found["warn"]
        assert [report.step for report in reports if report.spike] == [_SPIKE]
        assert all(report.kept for report in reports)
        assert reports[_SPIKE - 1].spike.startswith("loss ")
        reports, weights, _ = found["skip"]
        assert [report.step for report in reports if not report.kept] == [_SPIKE]
        assert reports[_SPIKE - 1].verdict is Verdict.SPIKE
        assert weights[_SPIKE - 1] == weights[_SPIKE - 2] != weights[_SPIKE]
        assert reports[-1].discarded == 1
        reports, _, failure = found["stop"]
        assert len(reports) == _SPIKE - 1
        assert gives(failure, f"step {_SPIKE}: a spike")


def test_a_device_decides_as_the_host() -> None:
    host, device = (_reports(on_device=on_device) for on_device in (False, True))
    assert [report.verdict for report in device] == [report.verdict for report in host]
    assert [report.spike for report in device] == [report.spike for report in host]
    assert [report.step for report in host if report.verdict is Verdict.SPIKE] == [_SPIKE]


def _reports(*, on_device: bool) -> list[StepReport]:
    with lockstep.session(_config({"spike": "skip"}), objective=SpikeAt(_SPIKE)) as session:
        components = components_of(session)
        if on_device:
            world = components.world
            late = dataclasses.replace(
                components.update,
                consensus=DeviceConsensus(world.axis, world.device),
                readback=Readback(world.device, late=True),
            )
            session = Session(dataclasses.replace(components, update=late))
        return list(session)


def test_a_run_that_resumes_has_the_same_limits(tmp_path: Path) -> None:
    """The window is part of the state: the spike comes right after the checkpoint."""
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    _train(whole, _STEPS, SpikeAt(_SPIKE))
    _train(parts, _SPIKE - 1, SpikeAt(_STEPS + 1))
    _train(parts, _STEPS, SpikeAt(1))
    lines = [_metrics(run)[_SPIKE - 1 :] for run in (whole, parts)]
    assert [line["verdict"] for line in lines[0]] == ["spike", *["kept"] * (_STEPS - _SPIKE)]
    for name in ("verdict", "spike", "loss"):
        assert [line[name] for line in lines[1]] == [line[name] for line in lines[0]]


def _train(folder: Path, steps: int, objective: SpikeAt) -> None:
    asked = _config({"spike": "skip"}, monitor={"every": 1, "tensorboard": False, "progress": "none"})
    lockstep.train({**asked, "run": {"steps": steps, "folder": str(folder)}}, objective=objective)


def _metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_limits_are_those_of_the_median_and_the_median_absolute_deviation() -> None:
    draws = random.Random(0)
    for window in (8, 9, 64):
        spikes, seen = Spikes(window, 5.0), []
        for step in range(1, 5 * window):
            limits = spikes.limits(step)
            renewed = step - step % max(1, window // 16)
            recent = np.array(seen[: max(0, renewed - 2)][-window:])
            if len(recent) < window:
                assert limits == Limits()
            else:
                assert limits == pytest.approx([_expected(recent[:, column], 5.0) for column in (0, 1)])
            numbers = draws.choice([1.0, draws.random(), draws.gauss(0, 3)]), draws.lognormvariate(0, 1)
            seen.append(numbers)
            spikes.see(step, *numbers)
        again = Spikes(window, 5.0)
        again.restore(json.loads(json.dumps(spikes.state())))
        assert again.limits(5 * window) == spikes.limits(5 * window)


def _expected(numbers: Any, threshold: float) -> float:
    middle = len(numbers) // 2
    median = np.sort(numbers)[middle]
    deviation = np.sort(np.abs(numbers - median))[middle]
    return float(median + threshold * max(1.4826 * deviation, 0.01 * abs(median)))


def test_numbers_that_hardly_vary_have_no_spikes_of_a_few_permille() -> None:
    spikes = Spikes(8, 20.0)
    for step in range(1, 11):
        spikes.see(step, 2.0, 1.0)
    limits = spikes.limits(20)
    assert limits == pytest.approx((2.4, 1.2))
    assert limits.reason(2.3, 1.1) == ""
    assert limits.reason(1.0, math.inf).startswith("gradient norm inf")
