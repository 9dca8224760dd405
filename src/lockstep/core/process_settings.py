"""Settings of this process: standard streams, open files, the heap, and Python's garbage collector."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache

_OPEN_FILES = 65_536  # more than any run has; a limit of many millions makes other programs slow
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_... of malloc.h
_KEPT = 1 << 30  # free bytes at the heap's end above which they are returned to the system
_LARGEST = 32 << 20  # the largest block that the heap holds; mallopt(3) allows no more
_MALLOC_SETTINGS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "LD_PRELOAD")


def open_closed_streams() -> None:
    """Replace each closed standard stream with /dev/null, for this process and those that it starts.

    After `lockstep train ... >&-`, Python sets it to None, and the next file that is opened gets its descriptor.
    """
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is not None:
            continue
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
        os.set_inheritable(number, True)
        setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115  it stays open


def raise_open_file_limit() -> None:
    """Raise the soft limit of open files, often 1,024, as far as the hard one allows.

    Data workers pass tensors as open files, and a relay has connections of all ranks.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@cache  # forked processes inherit it
def keep_freed_memory() -> bool:
    """Let this process keep the memory that it frees; return whether it does. The user's malloc settings have priority.

    Each forward allocates what the last backward freed. The C library returns large blocks to the system in between,
    and gets them again page by page: some 4,000 page faults an update of the default recipe, a tenth of its time.
    """
    import ctypes

    if sys.platform != "linux" or any(name in os.environ for name in _MALLOC_SETTINGS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it
    return mallopt is not None and all(
        mallopt(option, value) == 1 for option, value in ((_MMAP_THRESHOLD, _LARGEST), (_TRIM_THRESHOLD, _KEPT))
    )


@contextmanager
def paused_collection() -> Iterator[None]:
    """Collect no garbage while the block runs; what it drops is freed all the same.

    Ten thousand new objects would start a collection, which looks at every object of the process: 0.3 s with torch and
    a model of 10,000 tensors.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
