"""Processes of this machine, what identifies one (ids come again, each machine has its own), and forks of this one."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import BinaryIO, TypeVar

from lockstep.core.stopping import die_with_parent

T = TypeVar("T")


def machine() -> str:
    """Return the boot id and the pid namespace; only processes with the same ones see each other's ids."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def started(process: int) -> str:
    """Return a process's start in clock ticks since boot; empty if unknown."""
    return _field(process, 19)


def parent(process: int) -> int:
    """Return the id of a process's parent; 0 if unknown."""
    return int(_field(process, 1) or 0)


def state(process: int) -> str:
    """Return the kernel's letter for a process's state, such as T (stopped); empty if unknown."""
    return _field(process, 0)


def identity(process: int) -> tuple[str, int, str]:
    """Return a process's machine, id and start, which no other process has."""
    return machine(), process, started(process)


def waited_for_core(tasks: Path = Path("/proc/self/task")) -> float | None:
    """Return the seconds that the main thread was ready without a core; None if unknown (sched-stats.rst)."""
    try:
        return int((tasks / str(os.getpid()) / "schedstat").read_text().split()[1]) * 1e-9
    except (OSError, ValueError, LookupError):
        return None


def _field(process: int, number: int) -> str:
    """Return a field of /proc/PROCESS/stat, counted from behind the name; empty if there is none."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(errors="replace")  # its name may be in any encoding
        return stat.rpartition(")")[2].split()[number]
    except (OSError, LookupError):
        return ""


# --- forks of this process ------------------------------------------------------------------------------------------


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
    return next(in_forks([function]))


def in_forks(functions: Iterable[Callable[[], T]], at_once: int = 1) -> Iterator[T]:
    """Yield the results of functions in their order; `at_once` of them run, each as by `in_fork`."""
    left, begun = iter(functions), deque[tuple[Callable[[], T], int, BinaryIO]]()
    try:
        while True:
            begun.extend(map(_forked, islice(left, at_once - len(begun))))
            if not begun:
                return
            function, child, pipe = begun[0]
            with pipe:
                result = pipe.read()
            begun.popleft()
            os.waitpid(child, 0)
            yield pickle.loads(result) if result else function()
    finally:
        for _, child, pipe in begun:
            pipe.close()
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _forked(function: Callable[[], T]) -> tuple[Callable[[], T], int, BinaryIO]:
    receiving, sending = os.pipe()
    parent, child = os.getpid(), os.fork()
    if child == 0:
        try:
            die_with_parent(parent)
            os.write(sending, pickle.dumps(function()))
        finally:
            os._exit(0)
    os.close(sending)
    return function, child, os.fdopen(receiving, "rb")


def _uses_accelerator() -> bool:
    torch = sys.modules.get("torch")
    current = None if torch is None else torch.accelerator.current_accelerator()
    if torch is None or current is None:
        return False
    modules = (torch.cuda, torch.get_device_module(current))  # a plugin's device hides the one of the build
    return any(getattr(module, "is_initialized", lambda: True)() for module in modules)


def _native_threads() -> int:
    return len(os.listdir("/proc/self/task"))
