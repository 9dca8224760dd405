"""The name of the distribution, and the systems that it runs on."""

from __future__ import annotations

import sys

DISTRIBUTION = "lockstep-torch"


def pip_install(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def why_not_here(platform: str | None = None) -> str | None:
    """Return why Lockstep can't run on this operating system, if it can't: it forks, and reads /proc."""
    platform = platform or sys.platform
    if platform == "linux":
        return None
    way = "use WSL 2" if platform in ("win32", "cygwin") else "use a Linux machine, a virtual machine or a container"
    return f"Lockstep runs on Linux, and this is {platform}; {way}"
