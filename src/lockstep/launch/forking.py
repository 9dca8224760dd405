"""Forks of this process: whether there may be any, and work in one that must not start a driver here."""

from __future__ import annotations

import os
import pickle
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def may_fork() -> bool:
    """Return whether a forked copy of this process can compute: it has no other threads, and uses no accelerator.

    OpenBLAS (numpy) has threads that it ends in a fork handler and starts again when it needs them. libgomp's threads
    (torch's, after its first parallel loop) do not survive a fork, and a child that computes waits for them forever. A
    child that does nothing ends the former and reveals the latter.
    """
    if sys.platform != "linux" or threading.active_count() > 1 or _uses_accelerator():
        return False
    if _native_threads() > 1:
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    return _native_threads() == 1


def in_fork(function: Callable[[], T]) -> T:
    """Return the result of a function that runs in a forked copy of this process: what it starts ends with it.

    If it fails there, it runs here, so that its error is this process's.
    """
    receiving, sending = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(sending, pickle.dumps(function()))
        finally:
            os._exit(0)
    os.close(sending)
    with os.fdopen(receiving, "rb") as results:
        result = results.read()
    os.waitpid(child, 0)
    return pickle.loads(result) if result else function()


def _uses_accelerator() -> bool:
    torch = sys.modules.get("torch")
    current = None if torch is None else torch.accelerator.current_accelerator()
    if torch is None or current is None:
        return False
    modules = (torch.cuda, torch.get_device_module(current))  # a plugin's device hides the one of the build
    return any(getattr(module, "is_initialized", lambda: True)() for module in modules)


def _native_threads() -> int:
    return len(os.listdir("/proc/self/task"))
