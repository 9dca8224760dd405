"""Settings of this process: standard streams, open files, the heap, the environment, and the garbage collector."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache

_OPEN_FILES = 65_536  # more than any run has; a limit of many millions makes other programs slow
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_... of malloc.h
_KEPT = 1 << 30  # free bytes at the heap's end above which they are returned to the system
_LARGEST = 32 << 20  # the largest block that the heap holds; mallopt(3) allows no more
_MALLOC_SETTINGS = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "LD_PRELOAD")


def open_closed_streams() -> None:
    """Replace closed standard streams (`>&-`) with /dev/null: the next file would get their descriptors."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        if getattr(sys, name) is not None:
            continue
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
        os.set_inheritable(number, True)
        setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))  # noqa: SIM115  it stays open


def raise_open_file_limit() -> None:
    """Raise the soft limit of open files: data workers pass tensors as files, relays have many connections."""
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


@cache  # forked processes inherit it
def keep_freed_memory() -> bool:
    """Keep freed memory in this process, unless the user has malloc settings; return whether it does.

    glibc would return large blocks after each backward, and get them again page by page: a tenth of a small step.
    """
    import ctypes

    if sys.platform != "linux" or any(name in os.environ for name in _MALLOC_SETTINGS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it
    settings = ((_MMAP_THRESHOLD, _LARGEST), (_TRIM_THRESHOLD, _KEPT))
    return mallopt is not None and all(mallopt(option, value) == 1 for option, value in settings)


@contextmanager
def set_environment(variables: Mapping[str, str], *others: str) -> Iterator[None]:
    """Set variables in the block, and restore them after it; `others` are only restored."""
    names = (*variables, *others)
    before = {name: os.environ[name] for name in names if name in os.environ}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in names:
            os.environ.pop(name, None)
        os.environ.update(before)


@contextmanager
def paused_collection() -> Iterator[None]:
    """Pause the garbage collector in the block: a collection looks at every object, 0.3 s with torch."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
