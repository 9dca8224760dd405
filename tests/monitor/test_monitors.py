"""Fan-out to monitors: what each is shown, that failures are isolated, and what a step costs."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable

import pytest
from kit.reports import FACTS, report

from lockstep.core.records import EvaluationReport, Request, RunInfo, StepReport, Verdict
from lockstep.monitor.console import Console
from lockstep.monitor.events import EventLog
from lockstep.monitor.metric_log import Logged
from lockstep.monitor.monitors import BackgroundWriter, EpochReport, Monitors, ReportWriter


class Recorder(ReportWriter):
    """A monitor that records its reports."""

    def __init__(self, answer: Iterable[Request] = (), fails_at: int | None = None) -> None:
        self.answer = answer
        self.fails_at = fails_at
        self.steps: list[int] = []
        self.epochs: list[EpochReport] = []
        self.calls: list[str] = []

    def start(self, facts: RunInfo) -> None:
        self.calls.append("start")

    def see(self, report: StepReport) -> Iterable[Request]:
        if report.step == self.fails_at:
            raise RuntimeError("no more ink")
        self.steps.append(report.step)
        return self.answer

    def evaluated(self, report: EvaluationReport) -> Iterable[Request]:
        self.calls.append(f"evaluated {report.name}")
        return self.answer

    def epoch(self, report: EpochReport) -> None:
        self.epochs.append(report)

    def logged(self, step: int, logged: Logged) -> None:
        self.calls.append(f"logged {step}")

    def finish(self, error: BaseException | None) -> None:
        self.calls.append(f"finish {error}")


def written(writer: Recorder, every: int = 1) -> Monitors:
    monitors = Monitors([BackgroundWriter(writer)], every=every)
    monitors.start(FACTS)
    return monitors


def quick(step: int, **changes: object) -> StepReport:
    """Return a report of a run whose updates take a microsecond."""
    return report(step, seconds=step * 1e-6, **changes)


EVALUATION = EvaluationReport("held-out", 7, {"loss": 1.0}, 10, 0.1)


def test_a_writer_is_shown_the_first_report_what_is_due_and_the_last() -> None:
    watcher = Recorder()
    monitors = written(watcher, every=10)
    for step in range(1, 26):
        monitors.see(quick(step))
    monitors.finish(None)
    assert watcher.steps == [1, 10, 20, 25]
    assert watcher.calls == ["start", "finish None"]


def test_discarded_updates_are_always_shown() -> None:
    watcher = Recorder()
    monitors = written(watcher, every=10)
    for step in range(1, 9):
        monitors.see(quick(step, verdict=Verdict.OVERFLOW if step in (3, 4) else Verdict.KEPT))
    monitors.finish(None)
    assert watcher.steps == [1, 3, 4, 8]


def test_a_writer_sees_a_slow_run_whatever_the_step() -> None:
    watcher = Recorder()
    monitors = written(watcher, every=1000)
    for step in range(1, 5):
        monitors.see(report(step, seconds=float(step)))
    monitors.finish(None)
    assert watcher.steps == [1, 2, 3, 4]


def test_an_evaluation_comes_after_the_report_of_its_update() -> None:
    watcher = Recorder()
    monitors = written(watcher, every=100)
    for step in range(1, 8):
        monitors.see(quick(step))
    monitors.evaluated(EVALUATION)
    monitors.finish(None)
    assert watcher.steps == [1, 7]
    assert watcher.calls == ["start", "evaluated held-out", "finish None"]


def test_a_users_monitor_sees_every_report() -> None:
    other = Recorder()
    monitors = Monitors(others=[other], every=10)
    monitors.start(FACTS)
    for step in range(1, 12):
        monitors.see(quick(step))
    assert other.steps == list(range(1, 12))


def test_requests_are_the_union() -> None:
    monitors = Monitors(others=[Recorder(answer={Request.EVALUATE}), Recorder(answer=[Request.STOP])])
    monitors.start(FACTS)
    assert set(monitors.see(report(1))) == {Request.STOP, Request.EVALUATE}
    assert set(monitors.evaluated(EVALUATION)) == {Request.STOP, Request.EVALUATE}


def test_a_monitor_that_fails_is_left_out_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    bad, good = Recorder(fails_at=3), Recorder()
    monitors = Monitors([BackgroundWriter(bad), BackgroundWriter(good)], [Recorder(fails_at=4)])
    monitors.start(FACTS)
    for step in range(1, 7):
        monitors.see(report(step))
    monitors.finish(None)
    assert bad.steps == [1, 2]
    assert bad.calls == ["start"]
    assert good.steps == [1, 2, 3, 4, 5, 6]
    assert [record.message for record in caplog.records] == [
        "Recorder failed and is left out from now on: RuntimeError('no more ink')"
    ] * 2


def test_an_interrupt_goes_through() -> None:
    class Interrupted(Recorder):
        def see(self, report: StepReport) -> Iterable[Request]:
            raise KeyboardInterrupt

    monitors = Monitors(others=[Interrupted()])
    monitors.start(FACTS)
    with pytest.raises(KeyboardInterrupt):
        monitors.see(report(1))


def test_epochs_add_up_the_kept_updates_of_all_steps() -> None:
    watcher = Recorder()
    monitors = Monitors([BackgroundWriter(watcher)], every=100)
    monitors.start(FACTS.__class__(**{**_fields(FACTS), "epoch_samples": 192}))
    losses = {1: 3.0, 2: 2.0, 3: math.nan, 4: 5.0, 5: 6.0, 6: 10.0}
    counts = {1: 10.0, 2: 30.0, 3: 10.0, 4: 1.0, 5: 1.0, 6: 2.0}
    for step, loss in losses.items():
        verdict = Verdict.KEPT if math.isfinite(loss) else Verdict.NON_FINITE
        monitors.see(report(step, epoch=(step - 1) // 3, loss=loss, count=counts[step], verdict=verdict))
    monitors.finish(None)
    first, second = watcher.epochs
    assert first == EpochReport(0, 3, (3.0 * 10 + 2.0 * 30) / 40, 192, pytest.approx(0.3), True)  # type: ignore[arg-type]
    assert second == EpochReport(1, 6, (5.0 + 6.0 + 20.0) / 4, 384, pytest.approx(0.3), True)  # type: ignore[arg-type]


def test_an_epoch_entered_in_its_middle_is_marked() -> None:
    watcher = Recorder()
    monitors = Monitors([BackgroundWriter(watcher)])
    monitors.start(FACTS.__class__(**{**_fields(FACTS), "epoch_samples": 192}))
    monitors.see(report(2))
    monitors.see(report(3))
    monitors.finish(None)
    assert [(epoch.step, epoch.whole) for epoch in watcher.epochs] == [(3, False)]


def test_a_step_that_no_monitor_wants_costs_a_few_calls(tmp_path) -> None:
    monitors = Monitors(
        [
            BackgroundWriter(EventLog(tmp_path / "metrics.jsonl", 10**6)),
            BackgroundWriter(Console(10**6, "none")),
        ],
        every=10**6,
    )
    reports = [report(step, seconds=step * 1e-5) for step in range(1, 5001)]
    monitors.start(FACTS)
    monitors.see(reports[0])
    calls = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    sys.setprofile(count)
    for each in reports:
        monitors.see(each)
    sys.setprofile(None)
    assert calls <= 3 * len(reports), calls


def _fields(facts: RunInfo) -> dict[str, object]:
    return {name: getattr(facts, name) for name in facts.__dataclass_fields__}
