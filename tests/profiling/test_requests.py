"""Requests for traces: of a run that starts, that has been killed, or that was started again."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path

import pytest
from kit.failures import fails

from lockstep.config.training_sections import ProfileConfig
from lockstep.core.errors import RunFailed
from lockstep.monitor.attempts import Attempt, attempts_text, is_running
from lockstep.monitor.folder import RunFolder
from lockstep.monitor.trace_requests import REQUEST, TRACE_SUFFIX, RequestWatch
from lockstep.profiling import requesting
from lockstep.profiling.requesting import request_traces

REQUESTED = ProfileConfig(steps="1..2").model_dump_json()


def requested(run: Path) -> Path:
    (run / "profile").mkdir(exist_ok=True)
    file = run / "profile" / REQUEST
    file.write_text(REQUESTED)
    return file


def test_a_request_that_came_while_the_run_started_is_kept_and_an_earlier_one_is_not(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    for age, announced in ((0.0, [REQUESTED.encode()]), (-60.0, [])):
        file, names = requested(run.path), []
        os.utime(file, (time.time() + age,) * 2)
        watch = RequestWatch(run.path, lambda request, names=names: names.append(request), lambda: True)
        watch.start()
        limit = time.monotonic() + 30
        while announced and not names and time.monotonic() < limit:
            time.sleep(0.02)
        watch.stop()
        assert names == announced
    run.release()


def test_a_run_whose_launcher_is_dead_does_not_run_although_its_live_file_is_fresh(tmp_path: Path) -> None:
    run = RunFolder.create(tmp_path / "run")
    (run.path / "live.json").write_text("{}")
    assert is_running(run.path)
    with subprocess.Popen(["true"]) as ended:
        pass
    lock = (run.path / "run.lock").read_text().replace(str(os.getpid()), str(ended.pid))
    run.release()
    (run.path / "run.lock").write_text(lock)
    assert not is_running(run.path)
    (run.path / "run.lock").write_text("process 1 on elsewhere, since 2026-11-21 09:30:00\n")
    assert is_running(run.path)


def test_a_trace_that_ends_before_the_run_takes_the_request_is_another_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requesting, "_POLL_S", 0.02)
    run = RunFolder.create(tmp_path / "run")
    (run.path / "attempts.jsonl").write_text(attempts_text([Attempt(0.0, 1.0, facts={"ranks": 1})]))
    folder = run.path / "profile"

    def train() -> None:
        while not (folder / REQUEST).exists():
            time.sleep(0.01)
        (folder / f"rank0.1-2{TRACE_SUFFIX}").write_bytes(b"another's")
        time.sleep(0.2)
        (folder / REQUEST).unlink()
        requested(run.path)  # the next one's, which stays
        (folder / f"rank0.7-8{TRACE_SUFFIX}").write_bytes(b"own")

    thread = threading.Thread(target=train)
    thread.start()
    (file,) = request_traces(run.path, ProfileConfig(steps=2), 30.0)
    thread.join()
    assert file.read_bytes() == b"own"
    assert (folder / REQUEST).exists()
    run.release()


def test_why_no_trace_came_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requesting, "_POLL_S", 0.02)
    run = RunFolder.create(tmp_path / "run")
    with fails(RunFailed, "first update"):
        request_traces(run.path, ProfileConfig(steps=1), 0.1)
    assert not (run.path / "profile").exists()
    (run.path / "attempts.jsonl").write_text(attempts_text([Attempt(0.0, 1.0, facts={"ranks": 2})]))
    with pytest.raises(RunFailed, match="no rank 5"):
        request_traces(run.path, ProfileConfig(steps=1, ranks=(5,)), 0.1)
    with fails(RunFailed, "rank 0, 1"):
        request_traces(run.path, ProfileConfig(steps=1, ranks="all"), 0.1)
    assert not list((run.path / "profile").iterdir())
    request = requested(run.path)
    with fails(RunFailed, "another request"):
        request_traces(run.path, ProfileConfig(steps=1), 0.1)
    request.unlink()
    run.release()
    monkeypatch.setattr(requesting, "_GRACE_S", 0.0)
    with fails(RunFailed, "ended", "rank 0"):
        request_traces(run.path, ProfileConfig(steps=1), 5.0)
