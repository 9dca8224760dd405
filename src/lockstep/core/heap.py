"""The heap of this process: memory that is freed is kept."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_... of malloc.h
_KEPT = 1 << 30  # free bytes at the heap's end above which they are returned to the system
_LARGEST = 32 << 20  # the largest block that the heap holds; mallopt(3) allows no more
_MALLOC_SETTINGS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "LD_PRELOAD")


@cache  # forked processes inherit it
def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees; return whether it does. The user's malloc settings have priority.

    Each forward allocates what the last backward freed. The C library returns large blocks to the system in between,
    and gets them again page by page: some 4,000 page faults an update of the default recipe, a tenth of its time.
    """
    if sys.platform != "linux" or any(name in os.environ for name in _MALLOC_SETTINGS):
        return False
    libc = ctypes.CDLL(None)
    mallopt = getattr(libc, "mallopt", None)  # glibc has it
    return mallopt is not None and all(
        mallopt(option, value) == 1 for option, value in ((_MMAP_THRESHOLD, _LARGEST), (_TRIM_THRESHOLD, _KEPT))
    )
