"""Points, some of which end the process that reads them, or keep it in C for ever."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import Any

from kit import small


def _lock_twice(library: ctypes.CDLL) -> None:
    """Wait for a lock for ever; signals don't interrupt it, as they do a sleep."""
    lock = ctypes.create_string_buffer(64)
    library.pthread_mutex_lock(lock)
    library.pthread_mutex_lock(lock)


FAULTS: Mapping[str, Callable[[], object]] = {
    "crash": lambda: ctypes.string_at(0),
    "abort": os.abort,
    "exit": lambda: os._exit(3),
    "exit as if done": lambda: os._exit(0),
    "exit as if saved": lambda: os._exit(75),
    "exit of Python": lambda: sys.exit(0),
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda: _lock_twice(ctypes.CDLL(None)),
    "hang with the interpreter's lock": lambda: _lock_twice(ctypes.PyDLL(None)),
}


class Points:
    """40 points; `faults`: what reading some of them does, by index."""

    def __init__(self, faults: Mapping[str, str] | None = None) -> None:
        self._points, self._faults = small.points(), faults or {}

    def __len__(self) -> int:
        return len(self._points)

    def __getitem__(self, index: int) -> Any:
        if (fault := self._faults.get(str(index))) is not None:
            FAULTS[fault]()
        return self._points[index]


class Lists(Points):
    """Points that are read several at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]
