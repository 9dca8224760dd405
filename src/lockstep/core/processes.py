"""What tells processes apart: ids come again, and each machine has its own."""

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
    try:
        stat = Path(f"/proc/{process}/stat").read_text(errors="replace")  # its name may be in any encoding
        return stat.rpartition(")")[2].split()[19]
    except (OSError, LookupError):
        return ""
