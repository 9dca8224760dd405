"""Ctrl-C, SIGTERM, and SIGHUP of a terminal that is closed: once asks all ranks to stop at the next update, twice stops
now."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from lockstep.core.errors import Stopped
from lockstep.core.records import Request

_ASKING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_ONE_WISH_S = 0.5  # a terminal and a launcher may both pass on one Ctrl-C
_HEARD = b"lockstep: stops after this update, and saves; once more stops at once\n"


class StopSignals:
    """What has been heard so far.

    Args:
        tell: say that the first was heard; an update may take a while.
    """

    def __init__(self, tell: bool) -> None:
        self._tell = tell
        self._heard_at: float | None = None

    def requests(self) -> tuple[Request, ...]:
        return () if self._heard_at is None else (Request.STOP,)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self._heard_at is None:
            self._heard_at = now
            if self._tell:
                with suppress(OSError):  # the terminal is what was closed
                    os.write(2, _HEARD)  # print() could be what was interrupted
        elif now - self._heard_at > _ONE_WISH_S:
            raise Stopped(f"stopped at once by a second signal ({signal.Signals(number).name})")


@contextmanager
def stop_signals(*, tell: bool = False) -> Iterator[StopSignals]:
    """Listens while the block runs; handlers of before come back after it. Only a main thread can listen."""
    signals = StopSignals(tell)
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    wanted = [number for number in _ASKING if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, signals._hear) for number in wanted}  # what is ignored, a launcher handles
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
