"""Reaps processes that ranks have left, where they become children of the launcher.

    rank 1 --- data workers        rank 1 is killed, and its workers end     --> orphans of process 1, or a subreaper
    launcher is process 1          as in a container without an init         --> zombies, unless it waits for them

A launcher of a program that has other threads leaves them: a thread may have started the process, and wait for it.
"""

from __future__ import annotations

import ctypes
import multiprocessing.process
import os
import sys
import threading
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path

_PR_GET_CHILD_SUBREAPER = 37  # linux/prctl.h


class Orphans:
    """The children that this process adopts from now on."""

    def __init__(self) -> None:
        self._own = children() if adopts() else None

    def reap(self) -> None:
        """Reap those that have ended. Others wait for what this process starts by itself."""
        if self._own is None or threading.active_count() > 1:
            return
        started = {process.pid for process in multiprocessing.process._children}  # type: ignore[attr-defined]
        started.add(resource_tracker._resource_tracker._pid)  # type: ignore[attr-defined]
        for child in children() - self._own - started:
            with suppress(ChildProcessError):
                os.waitpid(child, os.WNOHANG)


def adopts() -> bool:
    """Return whether orphans among this process's descendants become its children."""
    if sys.platform != "linux":
        return False
    is_subreaper = ctypes.c_int(0)
    ctypes.CDLL(None).prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(is_subreaper))
    return os.getpid() == 1 or bool(is_subreaper.value)


def children() -> set[int]:
    """Return this process's children; none where the kernel doesn't list them."""
    processes: set[int] = set()
    for file in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            processes.update(map(int, file.read_text().split()))
    return processes
