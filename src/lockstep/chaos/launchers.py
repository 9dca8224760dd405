"""The launcher of a run: a process forked from this one, which has imported torch. Its output goes to a file."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
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


def run_launcher(
    launch: Callable[[], int], output: Path, environment: Mapping[str, str], stop: StopRequest, seconds: float
) -> int:
    """Call a function in a new process, with its output appended to a file; return the exit code.

    Raises:
        RunFailed: It didn't end within `seconds`.
        Stopped: A signal has come.
    """
    process = multiprocessing.get_context("fork").Process(target=_launch, args=(launch, output, environment))
    process.start()
    until = time.monotonic() + seconds
    try:
        while (code := process.exitcode) is None:
            stop.check()
            if time.monotonic() > until:
                raise RunFailed(f"the run didn't end within {seconds:.0f} s")
            process.join(_PAUSE_S)
        return code
    finally:
        process.terminate()
        process.join(_END_WITHIN_S)
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
