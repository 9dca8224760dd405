"""How long a process's main thread has waited for a core that other threads and processes had."""

from __future__ import annotations

import os
from pathlib import Path

_NANO = 1e-9


def waited_for_core(tasks: Path = Path("/proc/self/task")) -> float | None:
    """Return the seconds in which this process's main thread was ready, but had no core; None if unknown.

    Args:
        tasks: Folder of the process's threads. Linux counts in its `schedstat`: seconds on a core, seconds in the
            queue, slices (Documentation/scheduler/sched-stats.rst).
    """
    try:
        return int((tasks / str(os.getpid()) / "schedstat").read_text().split()[1]) * _NANO
    except (OSError, ValueError, IndexError):
        return None
