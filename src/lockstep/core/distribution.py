"""The name of the distribution, the systems that it runs on, and versions of packages."""

from __future__ import annotations

import sys

DISTRIBUTION = "lockstep-torch"


def pip_install(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


def version_of(package: str) -> str:
    """Return the version of an installed package; empty: it isn't installed."""
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def why_not_here(platform: str | None = None) -> str | None:
    """Return why Lockstep can't run on this operating system, if it can't: it forks, and reads /proc."""
    platform = platform or sys.platform
    if platform == "linux":
        return None
    way = "use WSL 2" if platform in ("win32", "cygwin") else "use a Linux machine, a virtual machine or a container"
    return f"Lockstep runs on Linux, and this is {platform}; {way}"
