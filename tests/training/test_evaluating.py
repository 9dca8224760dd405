"""Evaluations: exact whatever the ranks, and when they are due."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit import small
from kit.worlds import in_world
from torch.nn import functional as F

import lockstep
from lockstep.config.every import Every
from lockstep.config.training_sections import ProfileConfig
from lockstep.core.errors import Failure
from lockstep.core.records import Batch, EvaluationReport, Request, RunInfo, SaveReport, StepReport
from lockstep.distributed import generators
from lockstep.loop.evaluations import Trigger
from lockstep.loop.session import components_of
from lockstep.models.objectives import TargetLoss
from lockstep.monitor.metric_log import MetricLog
from lockstep.monitor.monitors import Monitors
from lockstep.monitor.profiler import Profiler
from lockstep.training.monitoring import UserLogs
from lockstep.training.run import run

SIZES = {"held-out": 11, "tiny": 2, "large": 37}


def _config(**sections: Any) -> dict[str, Any]:
    config = small.config(**sections)
    config["data"]["evaluation"] = {
        name: {"kind": "custom", "target": "kit.small:points", "arguments": {"samples": size, "seed": size}}
        for name, size in SIZES.items()
    }
    return config


def _evaluated(config: dict[str, Any]) -> tuple[list[EvaluationReport], dict[str, tuple[float, float]]]:
    """The reports, and loss and accuracy as one forward over the whole set has them."""
    with lockstep.session(config) as session:
        for report in session:
            if report.step == 3:
                break
        model, expected = components_of(session).sharding.state.model, {}
        assert model.training
        reports = session.evaluate()
        assert model.training
        for name, size in SIZES.items():
            points, classes = small.points(size, size).tensors
            with torch.no_grad():
                logits = model(points)
            right = (logits.argmax(1) == classes).float().mean().item()
            expected[name] = (F.cross_entropy(logits, classes).item(), right)
        return reports, expected


@pytest.mark.parametrize(("ranks", "micro_size"), [(1, "auto"), (1, 4), (2, 4), (3, "auto"), (3, 1)])
def test_every_sample_counts_once(ranks: int, micro_size: int | str) -> None:
    config = _config(evaluation={"micro_size": micro_size})
    for reports, expected in in_world(ranks, _evaluated, config):
        assert [(report.name, report.samples, report.step) for report in reports] == [
            (name, size, 3) for name, size in SIZES.items()
        ]
        for report in reports:
            loss, accuracy = expected[report.name]
            assert dict(report.metrics) == {
                "loss": pytest.approx(loss, rel=1e-5),
                "accuracy": pytest.approx(accuracy, abs=1e-9),
            }


def _drawn(config: dict[str, Any]) -> list[tuple[str, float]]:
    with lockstep.session(config) as session:
        reports = [*session.evaluate(), *session.evaluate()]
        return [(report.name, report.metrics["loss"]) for report in reports]


def test_a_model_that_draws_has_the_same_metrics_again_and_where_ranks_have_the_same_batches() -> None:
    """16 samples in four batches, on any of these numbers of ranks."""
    config = small.config(evaluation={"micro_size": 4})
    config["model"]["target"] = "kit.drawing:Noisy"
    held = {"kind": "custom", "target": "kit.small:points", "arguments": {"samples": 16, "seed": 1}}
    config["data"]["evaluation"] = {"held": held, "same": held}
    (alone,) = in_world(1, _drawn, config)
    assert alone[:2] == alone[2:]
    assert alone[0][1] != alone[1][1], "each set has draws of its own"
    for strategy in ("ddp", "fsdp"):
        for drawn in in_world(2, _drawn, {**config, "parallel": {"strategy": strategy}}):
            assert drawn == [(name, pytest.approx(loss, rel=1e-6)) for name, loss in alone]


class _FailsOnce(small.CrossEntropy):
    """Draws from a registered generator, and fails in the second batch of the first evaluation."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(7)
        self._calls = 0

    def loss_sum(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        self._calls += 1
        drawn = self.generator.random()
        if self._calls == 2:
            raise ValueError("planted")
        return super().loss_sum(outputs, batch) + drawn


def test_an_evaluation_that_fails_gives_registered_generators_their_state_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(generators, "_registered", {})
    objective = _FailsOnce()
    lockstep.register_generator("noise", objective.generator)
    config = small.config(evaluation={"micro_size": 4})
    del config["objective"]
    with lockstep.session(config, objective=objective) as session:
        objective._calls, before = 0, objective.generator.bit_generator.state
        with pytest.raises(ValueError, match="planted"):
            session.evaluate()
        assert objective.generator.bit_generator.state == before
        session.evaluate()
        assert objective.generator.bit_generator.state != before


class _CountsForwards(small.Net):
    """Counts forwards, also in evaluation mode, and fails in one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = torch.nn.Buffer(torch.zeros((), dtype=torch.long))
        self.fails_at = 3

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        if self.seen == self.fails_at:
            raise ValueError("planted")
        return super().forward(points)


def test_an_evaluation_that_fails_gives_buffers_their_values_back() -> None:
    model = _CountsForwards()
    with lockstep.session(small.config(evaluation={"micro_size": 4}), model=model) as session:
        model.seen.zero_()
        with pytest.raises(ValueError, match="planted"):
            session.evaluate()
        assert model.seen == 0
        model.fails_at = -1
        session.evaluate()
        assert model.seen == 3


class _Noting:
    """A monitor that notes when evaluations were made."""

    def __init__(self) -> None:
        self.steps: list[int] = []

    def start(self, facts: RunInfo) -> None: ...

    def see(self, report: StepReport) -> Iterable[Request]:
        return ()

    def evaluated(self, report: EvaluationReport) -> Iterable[Request]:
        self.steps.append(report.step)
        return ()

    def saved(self, report: SaveReport) -> None: ...

    def finish(self, error: BaseException | None) -> None: ...


def _steps_of_evaluations(folder: Path, every: str | None, at_end: bool = True) -> list[int]:
    monitor = _Noting()
    config = small.config(evaluation={"every": every, "at_end": at_end})
    with lockstep.session(config, objective=TargetLoss(language=False)) as session:
        checkpoints = session.checkpoints(folder)
        profiler = Profiler(ProfileConfig(), components_of(session).world, folder)
        results = run(session, monitor, checkpoints, UserLogs(session, Monitors(), MetricLog()), profiler)
    assert results.progress.steps == 8
    assert bool(results.evaluations) == bool(monitor.steps)
    return monitor.steps


@pytest.mark.parametrize(
    ("every", "steps"),
    [
        (None, [8]),
        ("3 steps", [3, 6, 8]),
        ("4 steps", [4, 8]),
        ("26 samples", [2, 5, 7, 8]),  # 13, 26, 39, 40 | 53, 66, 79, 80 samples: 52 and 78 are passed, not met
        ("40 tokens", [4, 8]),
        ("1 epoch", [4, 8]),
        ("0.5 epochs", [2, 4, 6, 8]),
    ],
)
def test_when_evaluations_are_due(tmp_path: Path, every: str | None, steps: list[int]) -> None:
    assert _steps_of_evaluations(tmp_path, every) == steps


def test_no_evaluation_at_the_end_if_none_is_wanted(tmp_path: Path) -> None:
    assert _steps_of_evaluations(tmp_path / "a", "3 steps", at_end=False) == [3, 6]
    assert _steps_of_evaluations(tmp_path / "b", None, at_end=False) == []


def test_minutes_are_agreed_on_by_all_ranks_and_each_evaluation_is_made_once(tmp_path: Path) -> None:
    """Their clock is requested in the vote of an update, and followed after the next one."""
    steps = in_world(2, _steps_of_evaluations, tmp_path, "0.000001 minutes")
    assert steps == [[2, 4, 6, 8]] * 2


def test_a_request_is_made_again_only_if_it_was_lost() -> None:
    trigger = Trigger(Every(1e-9, "minutes"), Request.SAVE, epoch_samples=40, rank=0)
    requests = [trigger.requests() for _ in range(34)]
    assert [at for at, made in enumerate(requests) if made] == [0, 16, 32]
    trigger.restart()
    assert trigger.requests() == (Request.SAVE,)
    assert Trigger(Every(1e-9, "minutes"), Request.SAVE, epoch_samples=40, rank=1).requests() == ()


class Unreadable:
    """Points of which some can't be read; they are not among those that opening the set looks at, but for the first."""

    def __init__(self, samples: int, bad: int = -1) -> None:
        self._samples, self._bad = samples, bad

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, index: int) -> Any:
        if index == self._bad:
            raise OSError("broken image")
        return torch.zeros(4), 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"samples": 0}, r"^data\.evaluation\.held: the dataset is empty"),
        ({"samples": 80, "bad": 0}, r"^data\.evaluation\.held: sample 0 can't be read.* for training"),
    ],
)
def test_a_set_that_can_not_be_read_is_named_before_training(arguments: dict[str, int], message: str) -> None:
    config = small.config()
    target = f"{Unreadable.__module__}:Unreadable"
    config["data"]["evaluation"] = {"held": {"kind": "custom", "target": target, "arguments": arguments}}
    with pytest.raises(Failure, match=message), lockstep.session(config):
        pass


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_can_not_be_read_is_of_a_named_set(workers: int) -> None:
    config = small.config()
    config["data"]["loader"] = {"workers": workers}
    named = {"kind": "custom", "target": f"{Unreadable.__module__}:Unreadable", "arguments": {"samples": 80, "bad": 3}}
    config["data"]["evaluation"] = {"held": named}
    with (
        lockstep.session(config) as session,
        pytest.raises(Failure, match=r"^data\.evaluation\.held: sample 3 can't be read"),
    ):
        session.evaluate()
