"""Processes of this machine, and what identifies one: ids come again, and each machine has its own."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


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
