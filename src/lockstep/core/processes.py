"""Processes of this machine, and what identifies one: ids come again, and each machine has its own."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def machine() -> str:
    """Return what only processes that see each other's ids share: the boot, and the namespace of ids."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def started(process: int) -> str:
    """Return when a process was started, in ticks since the machine was; empty if there is none, or no /proc."""
    return _field(process, 19)


def parent(process: int) -> int:
    """Return the id of a process's parent; 0 if there is none, or no /proc."""
    return int(_field(process, 1) or 0)


def state(process: int) -> str:
    """Return the kernel's letter for the state of a process, such as T (stopped); empty if it isn't known."""
    return _field(process, 0)


def identity(process: int) -> tuple[str, int, str]:
    """Return a process's machine, id and start, which no other process has; a part that is unknown is empty."""
    return machine(), process, started(process)


def waited_for_core(tasks: Path = Path("/proc/self/task")) -> float | None:
    """Return the seconds in which this process's main thread was ready, but had no core; None if unknown.

    `schedstat` has nanoseconds on a core and in the queue for one (Documentation/scheduler/sched-stats.rst).
    """
    try:
        return int((tasks / str(os.getpid()) / "schedstat").read_text().split()[1]) * 1e-9
    except (OSError, ValueError, LookupError):
        return None


def _field(process: int, number: int) -> str:
    """Return a field of /proc/PROCESS/stat, counted from behind the process's name; empty if there is none."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(errors="replace")  # its name may be in any encoding
        return stat.rpartition(")")[2].split()[number]
    except (OSError, LookupError):
        return ""
