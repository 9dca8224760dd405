"""Launchers of runs: processes forked from this one, which has imported torch and isn't a rank; output goes to files.

with Launchers(stop, seconds) as launchers:
    launchers.start(function, ...)      --> in a process of its own; its result is the exit code
    launchers.ended()                   --> who has ended since the last call
    launchers.pause()                   --> raises when a signal has asked to stop, or the time is over
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
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
    """Processes that each run a launcher; those that are left when the block ends are ended.

    Args:
        seconds: From now on, within which they end.
    """

    def __init__(self, stop: StopRequest, seconds: float) -> None:
        self._stop = stop
        self._seconds = seconds
        self._until = time.monotonic() + seconds
        self._running: set[int] = set()

    def start(self, launch: Callable[[], int], output: Path, environment: Mapping[str, str]) -> int:
        """Call a function in a new process, with its output appended to a file; return the process."""
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            code = 1
            try:
                stop_at_once(trains=True)
                with output.open("ab") as file:
                    for stream in (1, 2):
                        os.dup2(file.fileno(), stream)
                os.environ.update(environment)
                code = launch()
            except Failure as failure:
                echo(message_of(failure), file=sys.stderr)
                code = failure.exit_code
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        self._running.add(child)
        return child

    def ended(self) -> dict[int, int]:
        """Return the processes that have ended since the last call, with their exit codes."""
        codes = {}
        for process in [*self._running]:
            pid, status = os.waitpid(process, os.WNOHANG)
            if pid:
                codes[process] = os.waitstatus_to_exitcode(status)
                self._running.remove(process)
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
        self._send(signal.SIGTERM)
        while self._running and time.monotonic() < until:
            self.ended()
            time.sleep(_PAUSE_S)
        self._send(signal.SIGKILL)  # ranks end with their launcher
        for process in self._running:
            os.waitpid(process, 0)

    def _send(self, number: signal.Signals) -> None:
        for process in self._running:
            with suppress(ProcessLookupError):
                os.kill(process, number)
