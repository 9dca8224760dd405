"""Linux's count of the time in which each thread of a process was on a core, or waited for one.

`schedstat` of a thread has nanoseconds on a core, nanoseconds in the queue for one, and slices
(Documentation/scheduler/sched-stats.rst).
"""

from __future__ import annotations

import os
from pathlib import Path

_NANO = 1e-9
_TASKS = Path("/proc/self/task")


def waited_for_core(tasks: Path = _TASKS) -> float | None:
    """Return the seconds in which this process's main thread was ready, but had no core; None if unknown."""
    times = _times(tasks, os.getpid())
    return None if times is None else times[1]


def _times(tasks: Path, thread: int) -> tuple[float, float] | None:
    try:
        running, waiting, *_ = (tasks / str(thread) / "schedstat").read_text().split()
        return int(running) * _NANO, int(waiting) * _NANO
    except (OSError, ValueError):
        return None
