"""Start times of processes, whose ids come again."""

from __future__ import annotations

from pathlib import Path


def started(process: int) -> str:
    """Return when a process was started, in ticks since the machine was; empty if there is none, or no /proc."""
    try:
        stat = Path(f"/proc/{process}/stat").read_text(errors="replace")  # its name may be in any encoding
        return stat.rpartition(")")[2].split()[19]
    except (OSError, LookupError):
        return ""
