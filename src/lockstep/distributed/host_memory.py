"""Memory of a rank that computes on the CPU.

Each forward allocates what the last backward freed. The C library gives large blocks back to the system in between, and
gets them again page by page: some 4,000 page faults an update of the default recipe, a tenth of its time.
"""

from __future__ import annotations

import ctypes
import os
import sys

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_... of malloc.h
_KEPT = 1 << 30  # bytes free at the heap's end, from which they are given back
_LARGEST = 32 << 20  # the largest block that the heap holds; mallopt(3) takes no more
_SAID_OTHERWISE = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "LD_PRELOAD")


def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees; return whether it does.

    The user's malloc settings have priority.
    """
    if sys.platform != "linux" or any(name in os.environ for name in _SAID_OTHERWISE):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it
    return mallopt is not None and all(
        mallopt(option, value) == 1 for option, value in ((_MMAP_THRESHOLD, _LARGEST), (_TRIM_THRESHOLD, _KEPT))
    )
