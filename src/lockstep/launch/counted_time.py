"""The time that counts of a rank that doesn't move: its launcher ran in it, and the rank didn't wait for a processor.

    look   rest --- wait --> look   rest --------- stopped ---------> look
                  counts                   a gap: doesn't count

The launcher didn't run if it slept longer than it had to. What it does between two sleeps is no gap, however long.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from lockstep.launch.rank_stacks import seconds_without_processor

_GAP_S = 1.0  # from a rest to the next look: this process didn't run
_MOST_GAPS = 64
_LOADED_S = 0.5  # after which waits for a processor are subtracted


class CountedTime:
    """The ages of the marks of ranks, without the time that doesn't count."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._rested = clock()
        self._gaps: deque[tuple[float, float]] = deque(maxlen=_MOST_GAPS)
        self._waited: dict[int, tuple[float, float]] = {}  # for a processor, by place: mark, seconds
        self._stopped: dict[int, float] = {}  # when it was first seen so, by place

    def rest(self) -> None:
        """Note that the launcher begins to wait for what comes next."""
        self._rested = self._clock()

    def look(self) -> float:
        """Note that the launcher looks at the ranks; return the time."""
        now = self._clock()
        if now - self._rested > _GAP_S:
            self._gaps.append((self._rested, now))
        self._rested = now
        return now

    def age(self, place: int, process: int, mark: float, now: float) -> float:
        """Return the seconds since a rank's mark that count."""
        age = self._since(mark, now)
        if age > _LOADED_S:
            age -= self._without_processor(place, process, mark)
        return max(0.0, age)

    def stopped(self, place: int, now: float, *, is_stopped: bool) -> float:
        """Return the seconds that count for which a rank has been seen stopped (SIGSTOP), until now."""
        if is_stopped:
            return self._since(self._stopped.setdefault(place, now), now)
        self._stopped.pop(place, None)
        return 0.0

    def _since(self, moment: float, now: float) -> float:
        return now - moment - sum(max(0.0, end - max(start, moment)) for start, end in self._gaps)

    def _without_processor(self, place: int, process: int, mark: float) -> float:
        seconds = seconds_without_processor(process)
        then = self._waited.get(place)
        if then is None or then[0] != mark:
            self._waited[place] = mark, seconds
            return 0.0
        return seconds - then[1]
