"""Signals that request a stop or a save from a run while it trains.

SIGINT, SIGTERM, SIGHUP, SIGUSR1    once: all ranks stop after the same update, and save; again: this process stops now
SIGUSR2                             all ranks save after the same update, and continue

Lockstep's launcher handles "again": a rank may get one signal twice.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lockstep.core.errors import Stopped
from lockstep.core.ranks import started_by_lockstep
from lockstep.core.records import Request
from lockstep.core.stopping import handled_signals, write_stderr

_SAME_SIGNAL_S = 0.5  # a terminal and a launcher may both pass on one Ctrl-C


class RunSignals:
    """The requests that signals have made so far.

    Args:
        shown: whether to print that a signal was received; an update may take a while.
        ends: whether the last update is done and saved, so that the run is about to end anyway.
        twice_stops: whether a second stop signal raises `Stopped` wherever the main thread is.

    Attributes:
        raised: whether there may be a request.
    """

    def __init__(self, *, shown: bool, ends: bool, twice_stops: bool) -> None:
        self._shown = shown
        self._twice_stops = twice_stops
        self._ends = ends
        self._stop_requested_at: float | None = None
        self._warned = False
        self._save_requested_at: float | None = None
        self._requests_save = False
        self.raised = False

    def requests(self) -> tuple[Request, ...]:
        """Return this rank's requests for the next vote. Each signal requests a save once."""
        self.raised = self._stop_requested_at is not None
        save, self._requests_save = self._requests_save, False
        requests = (Request.SAVE,) if save else ()
        return requests if self._stop_requested_at is None else (*requests, Request.PAUSE)

    def stops(self) -> bool:
        """Return whether this rank was asked to stop."""
        return self._stop_requested_at is not None

    def stop(self, number: int, frame: FrameType | None) -> None:
        """Handle a stop signal."""
        now = time.monotonic()
        if self._stop_requested_at is None:
            self._stop_requested_at, self._warned, self.raised = now, number == signal.SIGUSR1, True
            when = "is about to end anyway" if self._ends else "stops after this update, and saves"
            self._print(f"{when}; the same signal again stops at once")
        elif self._warned and number != signal.SIGUSR1:
            self._warned = False  # the limit that a scheduler has warned of: the same request
        elif self._twice_stops and now - self._stop_requested_at > _SAME_SIGNAL_S:
            raise Stopped(f"stopped at once by a second signal ({signal.Signals(number).name})")

    def save(self, number: int, frame: FrameType | None) -> None:
        """Handle a save signal."""
        now = time.monotonic()
        if self._save_requested_at is not None and now - self._save_requested_at <= _SAME_SIGNAL_S:
            return
        self._save_requested_at, self._requests_save, self.raised = now, True, True
        self._print("is about to end, and saves then" if self._ends else "saves after this update, and continues")

    def _print(self, text: str) -> None:
        if self._shown:
            write_stderr(text)


@contextmanager
def run_signals(*, shown: bool = False, ends: bool = False) -> Iterator[RunSignals]:
    """Handle signals while the block runs, in the main thread. Arguments as of `RunSignals`."""
    signals = RunSignals(shown=shown, ends=ends, twice_stops=not started_by_lockstep(os.environ))
    with handled_signals(signals.stop, signals.save):
        yield signals
