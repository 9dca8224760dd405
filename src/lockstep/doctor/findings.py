"""The result of a check, and the machine as a check sees it.

MachineView --> check(machine) --> Finding, Finding, ...     state, what was seen, remedy
"""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path


class FindingState(Enum):
    """The state of what was checked, the worst first."""

    WRONG = "wrong"
    WARNING = "warning"
    OK = "ok"
    NOT_HERE = "not here"


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact about this machine.

    Attributes:
        state: Whether training fails because of it.
        seen: What is there, with numbers.
        remedy: What to do, in the imperative; empty if nothing has to be done.
        name: The check's, which `examine` fills in.
    """

    state: FindingState
    seen: str
    remedy: str = ""
    name: str = ""

    def as_json(self) -> dict[str, str]:
        """Return the finding for `--json`."""
        return {"name": self.name, "state": self.state.value, "seen": self.seen, "remedy": self.remedy}


def ok(seen: str) -> Finding:
    """Return a finding that needs no remedy."""
    return Finding(FindingState.OK, seen)


def not_here(seen: str) -> Finding:
    """Return a finding about what this machine doesn't have, and needn't have."""
    return Finding(FindingState.NOT_HERE, seen)


def warning(seen: str, remedy: str) -> Finding:
    """Return a finding about what is slow, or fails in some runs."""
    return Finding(FindingState.WARNING, seen, remedy)


def wrong(seen: str, remedy: str) -> Finding:
    """Return a finding because of which training fails."""
    return Finding(FindingState.WRONG, seen, remedy)


def _file_time(folder: Path) -> float:
    """Return the time that the file system of a folder gives a new file. Raises OSError."""
    file = folder / f".lockstep-clock-{socket.gethostname()}-{os.getpid()}"
    try:
        file.write_bytes(b"")
        return file.stat().st_mtime
    finally:
        file.unlink(missing_ok=True)


def _addresses(host: str) -> list[str]:
    """Return the IP addresses that a name resolves to; none if it doesn't resolve."""
    with suppress(OSError):
        return sorted({str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    return []


@dataclass(frozen=True)
class MachineView:
    """The machine as checks see it; a test replaces a part.

    Attributes:
        environ: Environment variables.
        search_path: Where Python looks for modules.
        folder: Where runs are written; need not exist.
        cache: Where models and datasets are cached; need not exist.
        port: `launch.port`; 0: any.
        device: `launch.device`.
        root: The folder of `proc`, `sys` and `dev`.
        hostname: This machine's name.
        statvfs, file_time, addresses, now: How file systems, their clocks, names and the clock are read.
    """

    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    search_path: Sequence[str] = field(default_factory=lambda: tuple(sys.path))
    folder: Path = Path("runs")
    cache: Path = field(default_factory=lambda: Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache"))
    port: int = 0
    device: str = "auto"
    root: Path = Path("/")
    hostname: str = field(default_factory=socket.gethostname)
    statvfs: Callable[[Path], os.statvfs_result] = os.statvfs
    file_time: Callable[[Path], float] = _file_time
    addresses: Callable[[str], list[str]] = _addresses
    now: Callable[[], float] = time.time

    def existing(self, path: Path) -> Path:
        """Return the path, or the nearest folder above it that exists."""
        path = path.expanduser().absolute()
        return next((place for place in (path, *path.parents) if place.exists()), Path("/"))

    def text(self, path: str) -> str:
        """Return the text of a file below `root`; empty if it can't be read."""
        try:
            return (self.root / path).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return ""

    def names(self, path: str) -> list[str]:
        """Return the names in a folder below `root`, sorted; none if it can't be read."""
        try:
            return sorted(os.listdir(self.root / path))
        except OSError:
            return []
