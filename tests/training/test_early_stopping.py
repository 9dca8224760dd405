"""Runs that end early: when they do, on all ranks, after a resume, and what is refused."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from kit import small
from kit.failures import fails, gives
from kit.worlds import in_world

import lockstep
from lockstep.config.schema import EarlyStoppingConfig
from lockstep.core.records import EvaluationReport, Request, StepReport
from lockstep.loop.evaluations import EarlyStopping, EarlyStoppingState

STOPPING = {"metric": "held-out.loss", "patience": 3, "min_delta": 0.01}


def after(values: list[float], **options: Any) -> EarlyStopping:
    stopping = EarlyStopping(EarlyStoppingConfig(**{"metric": "held-out.loss", "patience": 2, **options}))
    metric = options.get("metric", "held-out.loss").split(".")[1]
    for number, value in enumerate(values):
        stopping.see([EvaluationReport("held-out", 10 * (number + 1), {metric: value}, 5, 0.1)])
    return stopping


@pytest.mark.parametrize(
    ("values", "options", "stops"),
    [
        ([3.0, 2.0, 2.1, 2.1], {}, True),
        ([3.0, 2.0, 2.1, 1.9, 2.0], {}, False),
        ([3.0, 2.0, 2.0, 2.0], {}, True),  # an equal value is no improvement
        ([3.0, 2.95, 2.92], {"min_delta": 0.1}, True),  # less than min_delta each
        ([3.0, 2.95, 2.85], {"min_delta": 0.1}, False),  # against the best, not the last
        ([1.0, 2.0, 3.0], {}, True),
        ([1.0, 2.0, 3.0], {"mode": "max"}, False),
        ([0.5, 0.6, 0.7], {"metric": "held-out.accuracy"}, False),
        ([0.5, 0.4, 0.4], {"metric": "held-out.accuracy"}, True),
        ([0.0, 0.6, 0.7], {"metric": "held-out.f1"}, False),
        ([math.nan, math.inf], {}, True),
        ([math.nan, 2.0, math.nan], {}, False),
        ([1.0, 2.0, 2.0], {"patience": 3}, False),
    ],
)
def test_evaluations_without_an_improvement_are_counted(
    values: list[float], options: dict[str, Any], stops: bool
) -> None:
    assert (after(values, **options).reason is not None) == stops


def test_the_reason_names_metric_and_best() -> None:
    reason = after([3.0, 2.0, 2.1, 2.1], min_delta=0.5).reason
    assert gives(reason, "held-out.loss", 0.5, 2, 2, "step 20")
    assert gives(after([math.nan] * 2).reason, "held-out.loss", 2, "never finite")


def test_a_metric_that_the_evaluation_turns_out_not_to_have_is_refused_with_the_nearest() -> None:
    stopping = EarlyStopping(EarlyStoppingConfig(metric="held-out.los"))
    with fails(lockstep.ConfigError, "held-out.los", "held-out.loss?", key="monitor.early_stopping.metric"):
        stopping.see([EvaluationReport("held-out", 10, {"loss": 1.0}, 5, 0.1)])


class Scored(small.CrossEntropy):
    """A metric of any name, which falls."""

    def __init__(self, name: str) -> None:
        self._name, self._value = name, 1.0

    def metrics(self, loss_sum: float, count: float, sums: Any) -> dict[str, float]:
        self._value *= 0.9
        return {"loss": loss_sum / count, self._name: self._value}


def scored(folder: Path, metric: str, **sections: Any) -> dict[str, Any]:
    config = small.config(run={"steps": 8, "folder": str(folder)}, evaluation={"every": "2 steps"}, **sections)
    config["data"]["evaluation"] = {"v1.5": config["data"]["evaluation"]["held-out"]}
    del config["objective"]
    return lockstep.train(config, objective=Scored(metric)).summary


@pytest.mark.parametrize(
    "section",
    [{"checkpoint": {"best": "v1.5.quality"}}, {"monitor": {"early_stopping": {"metric": "v1.5.quality"}}}],
)
def test_a_metric_without_a_known_direction_is_refused(section: dict[str, Any], tmp_path: Path) -> None:
    with fails(lockstep.ConfigError, "v1.5.quality", "high"):
        scored(tmp_path, "quality", **section)


def test_best_and_early_stopping_maximize_f1_of_a_set_with_a_dot(tmp_path: Path) -> None:
    summary = scored(
        tmp_path,
        "f1",
        checkpoint={"best": "v1.5.f1", "every": None},
        monitor={"early_stopping": {"metric": "v1.5.f1", "patience": 2}},
    )
    assert gives(summary["stopped_early"], "v1.5.f1", 2)
    assert summary["steps"] == 6
    steps = [path.name for path in (tmp_path / "checkpoints").iterdir() if path.name.startswith("step-")]
    assert sorted(steps) == ["step-00000002", "step-00000006"]


def test_the_accuracy_of_a_custom_model_is_known(tmp_path: Path) -> None:
    config = small.config(
        run={"steps": 4, "folder": str(tmp_path / "run")},
        checkpoint={"best": "held-out.accuracy"},
        evaluation={"every": "2 steps"},
        monitor={"early_stopping": {"metric": "held-out.accuracy"}},
    )
    assert "accuracy" in lockstep.train(config).summary["evaluation"]["held-out"]


def test_another_set_does_not_count_and_a_state_of_another_metric_is_left() -> None:
    stopping = after([1.0, 2.0])
    stopping.see([EvaluationReport("other", 30, {"loss": 9.0}, 5, 0.1)])
    assert stopping.reason is None
    state = after([1.0, 2.0, 2.0]).state()["early_stopping"]
    assert EarlyStoppingState(**state).waited == 2
    for metric, stops in (("held-out.loss", True), ("held-out.accuracy", False)):
        resumed = EarlyStopping(EarlyStoppingConfig(metric=metric, patience=2))
        resumed.restore(state)
        assert (resumed.reason is not None) == stops
    assert EarlyStopping(None).state() == {}


def trained(folder: Path, steps: int, strategy: str = "single", **stopping: Any) -> dict[str, Any]:
    config = small.config(
        parallel={"strategy": strategy},
        run={"steps": steps, "folder": str(folder)},
        schedule={"kind": "constant"},
        evaluation={"every": "2 steps"},
        monitor={"early_stopping": {**STOPPING, **stopping}, "tensorboard": False, "meter_seconds": 0},
    )
    return dict(lockstep.train(config).summary)


def test_a_run_ends_early_and_a_resumed_one_at_the_same_update(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    undisturbed = trained(tmp_path / "undisturbed", 2000)
    stopped_at = undisturbed["steps"]
    assert 6 < stopped_at < 2000
    assert gives(undisturbed["stopped_early"], "held-out.loss", 0.01, 3)
    assert undisturbed["stopped_early"] in " ".join(capsys.readouterr().out.split())
    assert json.loads((tmp_path / "undisturbed" / "summary.json").read_text())["stopped_early"]
    for cut in (stopped_at - 1, stopped_at - 3, stopped_at - 4):  # while it waits
        folder = tmp_path / str(cut)
        assert "stopped_early" not in trained(folder, cut)
        assert trained(folder, 2000)["steps"] == stopped_at
    again = tmp_path / "undisturbed"
    (again / "summary.json").unlink()  # killed after the last save
    resumed = trained(again, 2000)
    assert (resumed["steps"], resumed["stopped_early"]) == (stopped_at, undisturbed["stopped_early"])
    capsys.readouterr()
    assert trained(again, 2000) == resumed
    assert undisturbed["stopped_early"].partition(" in ")[0] in " ".join(capsys.readouterr().out.split())
    assert trained(again, 2001)["steps"] == stopped_at
    assert "monitor.early_stopping.patience above 3," in " ".join(capsys.readouterr().out.split())
    longer = trained(again, 2001, patience=5)
    assert longer["steps"] > stopped_at  # the limit is the config's, the count the checkpoint's


def test_all_ranks_end_together(tmp_path: Path) -> None:
    first, second = in_world(2, trained, tmp_path / "run", 2000, "ddp")
    assert (first["steps"], first["stopped_early"]) == (second["steps"], second["stopped_early"])
    assert first["steps"] < 2000


class Stopping(lockstep.extend.Monitor):
    """Ends the run at step 3."""

    def see(self, report: StepReport) -> list[Request]:
        return [Request.STOP] if report.step == 3 else []


def ended_by_a_monitor(folder: Path, strategy: str, steps: int = 8) -> dict[str, Any]:
    run = {"steps": steps, "folder": str(folder)}
    config = small.config(parallel={"strategy": strategy}, run=run, schedule={"kind": "constant"})
    return lockstep.train(config, monitors=[Stopping()]).summary


def test_a_monitor_that_requests_a_stop_ends_the_run_finished(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = in_world(2, ended_by_a_monitor, tmp_path / "two", "ddp")
    assert (first["steps"], first["stopped_early"]) == (second["steps"], second["stopped_early"])
    summary = ended_by_a_monitor(tmp_path / "one", "single")
    assert 3 <= summary["steps"] < 8
    assert summary["steps"] == first["steps"]
    assert summary["stopped_early"] == "a monitor requested it"
    assert json.loads((tmp_path / "one" / "summary.json").read_text())["steps"] == summary["steps"]
    assert ended_by_a_monitor(tmp_path / "one", "single") == summary
    assert gives(capsys.readouterr().out, "longer run.steps")
    assert "stopped_early" not in ended_by_a_monitor(tmp_path / "one", "single", 9)  # it continues beyond step 3


def test_what_cannot_stop_a_run_is_refused(tmp_path: Path) -> None:
    def refused(match: str, **stopping: Any) -> None:
        with pytest.raises(lockstep.ConfigError, match=match):
            trained(tmp_path, 4, **stopping)

    refused("early_stopping.metric held-ot.loss is not in data.evaluation", metric="held-ot.loss")
    refused("no evaluation will have held-out.accurac; did you mean held-out.accuracy", metric="held-out.accurac")
    refused("'loss' is not SET.METRIC", metric="loss")
    with pytest.raises(lockstep.ConfigError, match=r"needs evaluation\.every"):
        lockstep.train(small.config(run={"steps": 4}, monitor={"early_stopping": STOPPING}))
    with (
        pytest.raises(lockstep.ConfigError, match="leaves the loop to you"),
        lockstep.session(
            small.config(evaluation={"every": "2 steps"}, run={"steps": 4}, monitor={"early_stopping": STOPPING})
        ),
    ):
        pass
