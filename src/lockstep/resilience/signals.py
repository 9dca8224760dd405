"""Ctrl-C and SIGTERM: once asks all ranks to stop at the next update, twice stops now."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from lockstep.core.errors import Stopped
from lockstep.core.records import Request

_ONE_WISH_S = 0.5  # a terminal and a launcher may both pass on one Ctrl-C


class StopSignals:
    """What has been heard so far."""

    def __init__(self) -> None:
        self.heard: str | None = None
        self._heard_at = 0.0

    def requests(self) -> tuple[Request, ...]:
        return (Request.STOP,) if self.heard else ()

    def _hear(self, number: int, frame: FrameType | None) -> None:
        name, now = signal.Signals(number).name, time.monotonic()
        if self.heard is None:
            self.heard, self._heard_at = name, now
        elif now - self._heard_at > _ONE_WISH_S:
            raise Stopped(f"stopped at once by a second signal ({name})")


@contextmanager
def stop_signals() -> Iterator[StopSignals]:
    """Listens while the block runs; handlers of before come back after it. Only a main thread can listen."""
    signals = StopSignals()
    if threading.current_thread() is not threading.main_thread():
        yield signals
        return
    wanted = [number for number in (signal.SIGINT, signal.SIGTERM) if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, signals._hear) for number in wanted}  # what is ignored, a launcher handles
    try:
        yield signals
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
