"""Reports that Lockstep runs on Linux only, before an import fails elsewhere: it forks ranks, ends processes with their
parent, and reads cores, locks and memory as Linux has them.
"""

from __future__ import annotations

import sys


def why_not_here(platform: str | None = None) -> str | None:
    """Return why Lockstep can't run on this operating system; None if it can."""
    platform = platform or sys.platform
    if platform == "linux":
        return None
    way = "use WSL 2" if platform in ("win32", "cygwin") else "use a Linux machine, a virtual machine or a container"
    return f"Lockstep runs on Linux, and this is {platform}; {way}"
