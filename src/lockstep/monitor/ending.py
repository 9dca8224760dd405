"""How long the end of a run waits for its writers.

A writer that hangs, as on a network, uses no core. One at work, such as the import of a tracker's package on a crowded
host, uses one or waits for one, and what it has yet to write would be lost.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from lockstep.core.run_queue import seconds_at_work

_SHARE = 0.5  # of an interval, spent at work by all threads together
_MOST_ENDS = 4


class WritersAtWork:
    """States whether threads are at work, from now on.

    Args:
        threads: As `threading.Thread.native_id`.
        bound: Seconds that the end waits for threads that hang. For those at work it waits four times as long at most.

    Attributes:
        interval: Seconds between two answers of `continues`.
    """

    def __init__(self, threads: Sequence[int], bound: float) -> None:
        self._threads, self._most = threads, _MOST_ENDS * bound
        self.interval = bound / 4
        self._began = self._asked = time.monotonic()
        self._worked = seconds_at_work(threads)
        self._idle = False

    @property
    def seconds(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self._began

    def continues(self) -> bool:
        """Return whether they were at work lately; once they weren't, they never are.

        Only a whole interval counts: a shorter one shows nothing, as the system counts in ticks.
        """
        now = time.monotonic()
        if now - self._asked < self.interval:
            return not self._idle
        worked = seconds_at_work(self._threads)
        self._idle |= worked - self._worked < _SHARE * (now - self._asked) or now - self._began > self._most
        self._asked, self._worked = now, worked
        return not self._idle
