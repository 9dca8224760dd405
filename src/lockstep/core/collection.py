"""Pausing Python's garbage collection where many objects are made and dropped."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collection() -> Iterator[None]:
    """Collect no garbage while the block runs.

    What the block drops is freed all the same. Ten thousand new objects would start a collection, which looks at every
    object of the process: 0.3 s with torch and a model of 10,000 tensors.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
