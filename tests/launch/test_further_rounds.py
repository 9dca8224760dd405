"""Rounds that can't follow: ranks that can't be started again, and a stop that comes with a failure."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest
from kit.failures import fails, gives

from lockstep.config.schema import Launch
from lockstep.config.training_sections import Recovery
from lockstep.core.errors import RunFailed, message_of
from lockstep.core.failure_kinds import FailureKind
from lockstep.core.stopping import SignalRequests
from lockstep.launch import worker_group
from lockstep.launch.agent import LeaderRounds
from lockstep.launch.ends import End
from lockstep.launch.ends_file import read_ends
from lockstep.launch.local import _unless_stopped, launch, result_of
from lockstep.launch.outcome import LaunchResult, gist
from lockstep.launch.supervision import Supervisor
from lockstep.launch.worker_group import Ranks

if TYPE_CHECKING:
    from conftest import ForkServer

    from lockstep.launch.agent import Hosts

NO_PROCESSES = "[Errno 11] Resource temporarily unavailable"
KILLED = ["deaf,sleep:30", "kill:9"]


def test_ranks_that_cannot_be_started_again_at_once_are_started_later(fork_server: ForkServer, tmp_path: Path) -> None:
    code, _, err = fork_server.run("supervised", script=KILLED, failures=2, logs=str(tmp_path))
    assert (code, "can't be started" in err) == (0, False)


def test_ranks_that_cannot_be_started_again_end_the_run_with_the_reason(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    code, _, err = fork_server.run("supervised", script=KILLED, failures=99, logs=str(tmp_path))
    assert code == 1
    assert "Traceback" not in err
    first, second = "rank 1 was killed by SIGKILL", f"its ranks can't be started: {NO_PROCESSES}"
    assert err.index(f"lockstep: {first}") < err.index(second)
    assert [ends.text.startswith(first) for ends in read_ends(tmp_path)] == [True, True]


def test_ranks_that_cannot_be_started_at_all_end_the_run_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(*_: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(worker_group, "_start", refusing)
    with fails(RunFailed, f"[Errno {errno.EMFILE}]", os.strerror(errno.EMFILE)):
        launch(lambda: 0, 2, Launch(), None)


def failing(body: str) -> LaunchResult:
    """The result of a rank whose program is this."""
    try:
        exec(body)
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        return LaunchResult(FailureKind.EXCEPTION, f"rank 1 failed:\n{text}", is_traceback=True)
    raise AssertionError


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        pytest.param("raise ValueError('a\\nb')", "rank 1 failed: ValueError: a", id="two lines"),
        pytest.param("raise KeyboardInterrupt", "rank 1 failed: KeyboardInterrupt", id="no message"),
        pytest.param(
            "raise ExceptionGroup('all', [OSError()])",
            "rank 1 failed: ExceptionGroup: all (1 sub-exception)",
            id="group",
        ),
        pytest.param("raise RuntimeError('see\\n Traceback (')", "rank 1 failed: Traceback (", id="quotes a traceback"),
    ],
)
def test_the_last_exception_of_a_traceback_is_the_message(body: str, reason: str) -> None:
    assert message_of(failing(body).failure()) == reason


def test_a_cut_traceback_has_its_exception() -> None:
    cut = '... 9 characters ...\nong.py", line 10, in f\n    g()'
    text = f"rank 0 failed:\nTraceback (most recent call last):\n  {cut}\ntorch.OutOfMemoryError: no memory"
    assert gist(text) == "rank 0 failed: torch.OutOfMemoryError: no memory"


TAKEN = "/run belongs to another run now"


@pytest.mark.parametrize(
    ("kind", "pauses", "ended"),
    [
        (FailureKind.KILLED, False, FailureKind.KILLED),
        (FailureKind.PAUSED, True, FailureKind.FAILED),
    ],
)
def test_no_ranks_start_where_another_run_is_now(kind: FailureKind, pauses: bool, ended: FailureKind) -> None:
    """After a failure, and after hosts have paused their ranks for another one."""
    supervisor = Supervisor(Recovery(restarts=1), lambda: 7, lambda: lambda: 0, taken=lambda: TAKEN)
    hosts = cast("Hosts", SimpleNamespace(pauses=pauses, elastic=True))
    rounds = LeaderRounds(hosts, supervisor, 0.0, folder=Path("/run"), decision=lambda entry: {})
    result = LaunchResult(kind, "rank 0 has ended")
    assert rounds.next_entry([End(kind, "", 0.0)], result) is None
    concluded = rounds.concluded(result)
    assert concluded.kind is ended
    assert concluded.text.startswith(f"{result.text}\n{TAKEN}")


@pytest.mark.parametrize(
    ("act", "step", "code", "text"),
    [
        ("kill:9", 7, 75, "rank 0 was killed by SIGKILL"),
        ("raise:boom", 7, 75, "ValueError: boom"),
        ("give-up:no disk", 7, 1, "no disk"),
    ],
    ids=["killed", "exception", "a failure that would come again"],
)
def test_a_stop_that_comes_with_a_failure_is_one_if_ranks_would_start_again(
    fork_server: ForkServer, tmp_path: Path, act: str, step: int, code: int, text: str
) -> None:
    script = [f"deaf,stop-launcher:15,sleep:0.1,{act}"]
    done, _, err = fork_server.run("supervised", script=script, step=step, logs=str(tmp_path))
    assert done == code, err
    assert text in err
    assert gives(err, "stopped by SIGTERM", "failure") is (code == 75)
    assert [ends.kind.exit_code for ends in read_ends(tmp_path)] == [code]


@pytest.mark.parametrize(
    ("number", "requests", "kind", "code"),
    [
        (signal.SIGTERM, 1, FailureKind.HUNG, 75),
        (signal.SIGINT, 1, FailureKind.HUNG, 130),
        (signal.SIGTERM, 2, FailureKind.HUNG, 130),
        (signal.SIGTERM, 1, FailureKind.STOPPED, 75),
        (signal.SIGTERM, 1, FailureKind.LOST, 75),
        (signal.SIGTERM, 1, FailureKind.ROLLED_BACK, 75),
    ],
)
def test_the_code_of_a_stop_is_that_of_its_signal(number: int, requests: int, kind: FailureKind, code: int) -> None:
    """A rank that was stopped by a signal to all processes may report that before its launcher has the signal."""
    job = Ranks(lambda: 0, 2, Launch(), None, False, None, None)
    supervisor = Supervisor(Recovery(), lambda: 7, lambda: lambda: 0)
    with contextlib.closing(SignalRequests()) as signals:
        signals.stop(number, None)
        signals.own_stops = requests
        ends = [End(FailureKind.ENDED, "", 1.0), End(kind, "rank 1 hangs", 0.0)]
        result = _unless_stopped(job, result_of(ends, 9.0), ends, signals, supervisor)
    assert (result.code, result.cut_off) == (code, True)


def test_a_stop_between_rounds_is_one(fork_server: ForkServer, tmp_path: Path) -> None:
    code, _, err = fork_server.run("supervised", script=KILLED, stop="record", logs=str(tmp_path))
    assert code == 75, err
    assert gives(err, "stopped by SIGTERM", "rank 1", "SIGKILL")
