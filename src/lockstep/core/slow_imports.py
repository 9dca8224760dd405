"""Imports that take seconds, in a thread beside the training.

A fork during an import would inherit the module's lock without the thread that releases it, so forks wait for it.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, cast

_LONGEST_S = 30.0  # an import may hang, as that from a network's file system
_importing = threading.RLock()
_forking = threading.local()


def import_beside(name: str) -> Any:
    """Return a module, in any thread."""
    with _importing:
        return importlib.import_module(name)


@contextmanager
def not_importable(name: str) -> Iterator[None]:
    """Make a module, unless it is imported already, count as not installed in the block."""
    with _importing:
        is_there = name in sys.modules
        if not is_there:
            sys.modules[name] = cast("ModuleType", None)
        try:
            yield
        finally:
            if not is_there:
                del sys.modules[name]


def _before_fork() -> None:
    _forking.holds = _importing.acquire(timeout=_LONGEST_S)


def _after_fork() -> None:
    if _forking.holds:
        _importing.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
