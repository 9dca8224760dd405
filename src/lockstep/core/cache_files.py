"""The folder of what can be made or downloaded again, and locks by which one process makes it while others wait.

$LOCKSTEP_CACHE/KIND/...     by default ~/.cache/lockstep (or $XDG_CACHE_HOME/lockstep)
"""

from __future__ import annotations

import errno
import fcntl
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lockstep.core.terminal import echo

CACHE = "LOCKSTEP_CACHE"
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EBADF, errno.ENOSYS)
_POLL_S = 0.1
_SHOWN_S = 10.0


def cache_folder(kind: str) -> Path:
    """Return the folder of a kind of files that can be made, or downloaded, again."""
    if own := os.environ.get(CACHE):
        return Path(own).expanduser() / kind
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if os.path.isabs(root) else Path("~/.cache").expanduser()) / "lockstep" / kind


@contextmanager
def locked(path: Path, work: str) -> Iterator[Callable[[str], None]]:
    """Hold the lock while the block runs; meanwhile the others show what its holder has done. Raises OSError.

    Yields a function that shows how far the work is, to this process's user and those of the others.
    """
    handle = _opened(path)
    shown_at = time.monotonic()

    def show(text: str) -> None:
        nonlocal shown_at
        if prints() and time.monotonic() - shown_at > _SHOWN_S:
            shown_at = time.monotonic()
            echo(f"lockstep: {work}: {text}", file=sys.stderr, flush=True)

    def publish(text: str) -> None:
        with suppress(OSError):
            os.ftruncate(handle, 0)
            os.pwrite(handle, text.encode(), 0)
        show(text)

    try:
        while not _try_lock(handle):
            show(os.pread(handle, 200, 0).decode(errors="replace") or "begun by another process")
            time.sleep(_POLL_S)
        yield publish
        with suppress(OSError):
            os.ftruncate(handle, 0)
    finally:
        os.close(handle)  # which releases the lock, as does this process's end


def _opened(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except PermissionError:  # another user's, whose work can still be waited for
        if not path.exists():
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:  # a file system without locks: each process writes its own draft, and one is kept
        if error.errno not in _NO_LOCKS:
            raise
    return True


def prints() -> bool:
    """Return whether this process reports to the user what several processes of a host do."""
    return os.environ.get("LOCAL_RANK", "0") == "0"
