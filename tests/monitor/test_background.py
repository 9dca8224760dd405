"""Writers in threads: an update never waits for them, their order stays, and what is lost is reported once."""

from __future__ import annotations

import errno
import math
import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from kit.reports import FACTS, report

from lockstep.core.errors import ConfigError
from lockstep.core.records import EvaluationReport, SaveReport
from lockstep.monitor.events import EventLog
from lockstep.monitor.history import HistoryFiles
from lockstep.monitor.monitors import BackgroundWriter, Monitors, ReportWriter


class Hanging(ReportWriter):
    """A writer that hangs until it is released."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self.seen: list[object] = []

    def see(self, report: object) -> tuple[()]:
        self.released.wait(30)
        self.seen.append(report.step)  # type: ignore[attr-defined]
        return ()

    def saved(self, report: SaveReport) -> None:
        self.seen.append("saved")

    def finish(self, error: BaseException | None) -> None:
        self.seen.append(error)


def test_the_files_are_those_of_writers_without_a_thread(tmp_path: Path) -> None:
    direct = EventLog(tmp_path / "direct" / "metrics.jsonl", every=10)
    background = BackgroundWriter(EventLog(tmp_path / "thread" / "metrics.jsonl", every=10))
    resumed = replace(FACTS, resumed_from=0)
    direct.start(resumed)
    monitors = Monitors([background], every=10)
    monitors.start(resumed)
    evaluation = EvaluationReport("held-out", 57, {"loss": math.nan}, 10, 0.1)
    for step in range(1, 1005):
        if step == 1 or step % 10 == 0 or step in (57, 1004):
            direct.see(report(step))
        monitors.see(report(step))
        if step == 57:
            direct.evaluated(evaluation)
            monitors.evaluated(evaluation)
    direct.finish(None)
    monitors.finish(None)
    for name in ("metrics.jsonl", "events.jsonl"):
        assert (tmp_path / "thread" / name).read_bytes() == (tmp_path / "direct" / name).read_bytes()


def test_a_save_waits_for_what_was_reported_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write, released = os.write, threading.Event()

    def waits(file: int, data: bytes) -> int:
        assert released.wait(60)
        return write(file, data)

    monkeypatch.setattr(os, "write", waits)
    log = EventLog(tmp_path / "metrics.jsonl", every=1)
    background = Monitors([thread := BackgroundWriter(log)])
    files = HistoryFiles(log.files, drains=[thread.drain])
    for step in range(1, 11):
        background.see(report(step))  # doesn't wait: nothing is written before it is released
    released.set()
    files.flush()
    assert (tmp_path / "metrics.jsonl").read_bytes().count(b"\n") == 10
    background.finish(None)


def test_a_full_queue_drops_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    writer = Hanging()
    background = Monitors([thread := BackgroundWriter(writer, most=5)])
    for step in range(1, 21):
        background.see(report(step))
    background.saved(SaveReport(20, 1, 0.1, 0.0))
    assert not thread.drain(0.05)
    writer.released.set()
    background.finish(None)
    assert writer.seen[-2:] == ["saved", None], "saves and the end are never dropped"
    steps = writer.seen[:-2]
    assert steps == list(range(1, len(steps) + 1))
    assert [record.message for record in caplog.records] == [
        "Hanging can't keep up: the run continues without some of its reports",
        f"Hanging was too slow for {20 - len(steps)} reports, which are lost",
    ]


def test_a_writer_that_hangs_is_left_behind_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    writer = Hanging()
    background = Monitors([BackgroundWriter(writer, 0.1)])
    background.see(report(1))
    background.see(report(2))
    began = time.perf_counter()
    background.finish(RuntimeError("lost"))
    assert time.perf_counter() - began < 1.0
    writer.released.set()
    time.sleep(0.05)
    assert writer.seen == [1], "nothing is written once the run has ended"
    assert [record.message for record in caplog.records] == [
        "Hanging has not ended within 0.1 s: its last reports are lost"
    ]


def test_a_writer_that_raises_is_left_out_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Hanging):
        def see(self, report: object) -> tuple[()]:
            raise RuntimeError("no more ink")

    writer = Failing()
    background = Monitors([BackgroundWriter(writer)])
    for step in range(1, 4):
        background.see(report(step))
    background.finish(None)
    assert writer.seen == []
    assert [record.message for record in caplog.records] == [
        "Failing failed and is left out from now on: RuntimeError('no more ink')"
    ]


def test_a_disk_or_a_network_that_fails_is_a_sentence_without_a_traceback(caplog: pytest.LogCaptureFixture) -> None:
    def fails(error: Exception, cause: Exception | None = None) -> str:
        class Failing(Hanging):
            def see(self, report: object) -> tuple[()]:
                raise error from cause

        caplog.clear()
        background = Monitors([BackgroundWriter(Failing())])
        background.see(report(1))
        background.finish(None)
        (record,) = caplog.records
        assert not record.exc_info
        return record.message.partition("now on: ")[2]

    full = OSError(errno.ENOSPC, "No space left on device", "mlruns/meta.yaml")
    assert fails(full) == "[Errno 28] No space left on device: 'mlruns/meta.yaml'"
    assert (
        fails(RuntimeError("can't write\nat all"), full)
        == "can't write ([Errno 28] No space left on device: 'mlruns/meta.yaml')"
    )
    assert fails(ConfigError("wandb.init has no argument proj; did you mean project?")).endswith("mean project?")


def test_a_report_is_written_although_no_other_follows() -> None:
    writer = Hanging()
    writer.released.set()
    group = Monitors([BackgroundWriter(writer)])
    group.see(report(1))
    limit = time.monotonic() + 10.0
    while not writer.seen and time.monotonic() < limit:
        time.sleep(0.01)
    assert writer.seen == [1], "an update that hangs holds back none"
    group.finish(None)
