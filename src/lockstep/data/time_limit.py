"""Ends the reading of a sample that doesn't end, with an exception in the thread that reads.

    SIGALRM, four times a limit    sample 17    17    17    17 --> TimeoutError, at the line where it is
                                   sample 3     9     4     6  --> continues

A process that was stopped gets one signal, however long it lasted. It is the main thread that reads, of a rank or of a
data worker. Code that doesn't return to the interpreter isn't interrupted: the launcher's watch ends its rank.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType

from lockstep.core import heartbeat

_TICKS = 4


class _Over(BaseException):
    """The limit is over. No `except Exception` of a dataset catches it."""


@contextmanager
def time_limit(seconds: float | None) -> Iterator[None]:
    """Limit the time that reading a sample may take in the block, or all samples of a source that reads them at once.

    Raises:
        TimeoutError: It takes longer.
    """
    if seconds is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    beat = heartbeat.own()
    slots, at = beat.sample_slot()
    sample, ticks, place = slots[at], 0, None

    def tick(number: int, frame: FrameType | None) -> None:
        nonlocal sample, ticks, place
        if place is not None or frame is None:
            return
        sample, ticks = slots[at], ticks + 1 if slots[at] == sample else 1
        if ticks >= _TICKS:
            place = TracebackType(None, frame, frame.f_lasti, frame.f_lineno)
            beat.numbers[heartbeat.TIME] = time.perf_counter()  # the rank continues: the watch over it needn't end it
            raise _Over

    before = signal.signal(signal.SIGALRM, tick)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds / _TICKS, seconds / _TICKS)
        yield
    except _Over:
        raise TimeoutError(f"no end after {seconds:g} s (data.bad_samples.timeout)").with_traceback(place) from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
