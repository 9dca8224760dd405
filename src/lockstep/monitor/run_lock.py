"""The lock of a run's folder: held by the process that runs it, and by the ranks that are forked from it.

run.lock     process 4711 on node-a, since 2026-11-26 07:25:40
"""

from __future__ import annotations

import fcntl
import os
import re
import socket
import time
from pathlib import Path

from lockstep.core.files import read_bounded

LOCK = "run.lock"
HOLDER = re.compile(r"process (\d+) on (\S+), since (.+)")
"""The content of a lock: process, host, time."""
_MOST_LOCK = 1000
_FORKS_END_S = 10.0  # of a process that was killed: they end with it
_PAUSE_S = 0.05


def lock_holder(path: str | os.PathLike[str]) -> bytes | None:
    """Return the content of the run's lock, which differs from run to run; None if it can't be read."""
    try:
        return read_bounded(Path(path) / LOCK, _MOST_LOCK)
    except OSError:
        return None


def held_by(path: str | os.PathLike[str]) -> str | None:
    """Return what the run's lock states if a process holds it; None if none does, or that can't be seen."""
    try:
        handle = os.open(Path(path) / LOCK, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return (lock_holder(path) or b"").decode(errors="replace").strip()
    except OSError:
        return None
    finally:
        os.close(handle)
    return None


def holder_is_gone(path: str | os.PathLike[str]) -> bool:
    """Return whether the process that took the lock was one of this host, and has ended."""
    match = HOLDER.fullmatch((lock_holder(path) or b"").decode(errors="replace").strip())
    return match is not None and match[2] == socket.gethostname() and not Path("/proc", match[1]).exists()


def open_lock(path: Path) -> tuple[int, str | None]:
    """Open and take a run folder's lock; return its handle, and the holder if that is another process.

    If that has ended, the processes that were forked from it are waited for, which end with it.

    Raises OSError.
    """
    file = os.open(path / LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    until = time.monotonic() + _FORKS_END_S
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if holder_is_gone(path) and time.monotonic() < until:
                time.sleep(_PAUSE_S)
                continue
            return file, os.pread(file, _MOST_LOCK, 0).decode(errors="replace").strip() or "another process"
        except OSError:  # no locks on this file system: no process is kept out
            pass
        return file, None
