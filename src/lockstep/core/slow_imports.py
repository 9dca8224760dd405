"""Imports that take seconds, made in a thread beside the training.

A process that is forked while a thread imports a module has the module's lock, without the thread that would
release it: a worker of a loader that imports the same module would wait for ever. So a fork waits for the import.
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
    """Let a module, unless it is there already, count as not installed for what the block imports."""
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
