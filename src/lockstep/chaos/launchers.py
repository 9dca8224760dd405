"""Launchers of runs: processes forked from this one, which has imported torch. Their output goes to files."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType

from lockstep.core.errors import Failure, RunFailed, Stopped, message_of
from lockstep.core.stopping import stop_at_once
from lockstep.core.terminal import echo

_PAUSE_S = 0.02
_END_WITHIN_S = 15.0  # after SIGTERM, until SIGKILL


class StopRequest:
    """A signal handler that remembers that it was called."""

    def __init__(self) -> None:
        self._number = 0

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self._number = number

    def check(self) -> None:
        """Raise Stopped if a signal has come."""
        if self._number:
            raise Stopped(f"stopped by {signal.Signals(self._number).name}")


class Launchers:
    """Processes that each run a launcher, for `seconds` from now on; those left when the block ends are ended."""

    def __init__(self, stop: StopRequest, seconds: float) -> None:
        self._stop = stop
        self._seconds = seconds
        self._until = time.monotonic() + seconds
        self._running: dict[int, BaseProcess] = {}

    def start(self, launch: Callable[[], int], output: Path, environment: Mapping[str, str]) -> int:
        """Call a function in a new process, with its output appended to a file; return the process."""
        process = multiprocessing.get_context("fork").Process(target=_launch, args=(launch, output, environment))
        process.start()
        assert process.pid is not None
        self._running[process.pid] = process
        return process.pid

    def ended(self) -> dict[int, int]:
        """Return the processes that have ended since the last call, with their exit codes."""
        codes = {pid: code for pid, process in self._running.items() if (code := process.exitcode) is not None}
        for pid in codes:
            del self._running[pid]
        return codes

    def pause(self) -> None:
        """Let some time pass. Raises Stopped after a signal, and RunFailed when the time is over."""
        self._stop.check()
        if time.monotonic() > self._until:
            raise RunFailed(f"the run didn't end within {self._seconds:.0f} s")
        time.sleep(_PAUSE_S)

    def __enter__(self) -> Launchers:
        return self

    def __exit__(self, *exception: object) -> None:
        until = time.monotonic() + _END_WITHIN_S
        for process in self._running.values():
            process.terminate()
        for process in self._running.values():
            process.join(max(0.0, until - time.monotonic()))
            process.kill()  # ranks end with their launcher
            process.join()


def _launch(launch: Callable[[], int], output: Path, environment: Mapping[str, str]) -> None:
    stop_at_once(trains=True)
    with output.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ.update(environment)
    try:
        sys.exit(launch())
    except Failure as failure:
        echo(message_of(failure), file=sys.stderr)
        sys.exit(failure.exit_code)
