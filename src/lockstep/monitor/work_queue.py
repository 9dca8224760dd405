"""A bounded queue of calls, made one after the other in a thread of its own."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable

MOST_WEIGHT = 10_000
_Work = tuple[Callable[..., object], tuple[object, ...], int]


class WorkQueue:
    """Calls functions in the order in which they were put, in a thread that starts with the first.

    Args:
        name: of the thread.
        most: weight of the waiting functions, at most. A single one is always taken, and those without weight.

    Attributes:
        dropped: Number of functions that were not called, since the queue was full or closed.
    """

    def __init__(self, name: str, most: int = MOST_WEIGHT) -> None:
        self._name = name
        self._most = most
        self._changed = threading.Condition()
        self._waiting: deque[_Work] = deque()
        self._weight = 0
        self._busy_since = math.inf
        self._thread: threading.Thread | None = None
        self._closed = False
        self.dropped = 0

    def put(self, act: Callable[..., object], *arguments: object, weight: int = 1) -> bool:
        """Add a call of a function, which must not raise; return whether it fitted. Never waits."""
        with self._changed:
            if self._closed or (self._waiting and weight and self._weight + weight > self._most):
                self.dropped += 1
                return False
            self._waiting.append((act, arguments, weight))
            self._weight += weight
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()
            elif len(self._waiting) == 1:
                self._changed.notify_all()
        return True

    def drain(self, seconds: float = math.inf) -> bool:
        """Wait until all functions have been called; return False if that takes longer, or one already does."""
        limit = time.monotonic() + seconds
        with self._changed:
            while self._waiting or self._busy_since < math.inf:
                left = min(limit, self._busy_since + seconds) - time.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(None if left == math.inf else left)
        return True

    def wait(self, seconds: float) -> bool:
        """Wait that long, even for a function that already takes long; return whether all have been called."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._waiting and self._busy_since == math.inf, seconds)

    @property
    def thread(self) -> int | None:
        """The system's number of the thread, once it has begun."""
        return self._thread.native_id if self._thread is not None else None

    def close(self, seconds: float = math.inf) -> bool:
        """Wait as `drain` does, and call nothing more; return whether all functions were called."""
        done = self.drain(seconds)
        with self._changed:
            self._closed = True
            self.dropped += len(self._waiting)
            self._waiting.clear()
            self._changed.notify_all()
        return done

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
            while (work := self._next()) is not None:
                act, arguments, weight = work
                act(*arguments)
                del act, arguments, work  # and what they hold
                with self._changed:
                    self._weight -= weight
            if self._closed:
                return

    def _next(self) -> _Work | None:
        """Return the next call; None if nothing waits."""
        with self._changed:
            if self._waiting:
                self._busy_since = time.monotonic()
                return self._waiting.popleft()
            self._busy_since = math.inf
            self._changed.notify_all()
            return None
