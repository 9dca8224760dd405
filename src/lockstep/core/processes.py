"""Ends a process together with the one that started it, on Linux."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
import threading

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with(parent: int) -> None:
    """Let the kernel kill this process when its parent ends, however that ends."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel was told
        os._exit(1)


def end_with_other(process: int) -> None:
    """End this process when another one ends that isn't its parent. A thread waits for it."""
    if sys.platform != "linux":
        return
    try:
        handle = os.pidfd_open(process)
    except ProcessLookupError:
        os._exit(1)
    threading.Thread(target=_end_after, args=(handle,), name="end-with-other", daemon=True).start()


def _end_after(handle: int) -> None:
    poll = select.poll()
    poll.register(handle, select.POLLIN)
    poll.poll()
    os._exit(1)
