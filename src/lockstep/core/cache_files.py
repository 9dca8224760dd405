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

from lockstep.core.files import forget, is_same_file
from lockstep.core.terminal import echo

CACHE = "LOCKSTEP_CACHE"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EBADF, errno.ENOSYS)
_POLL_S = 0.1
_SHOWN_S = 10.0


def cache_folder(kind: str) -> Path:
    """Return the folder of a kind of files that can be made, or downloaded, again."""
    if own := os.environ.get(CACHE):
        return Path(own).expanduser() / kind
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if os.path.isabs(root) else Path("~/.cache").expanduser()) / "lockstep" / kind


def cache_remedy(error: OSError) -> str:
    """Return what to do about a file of the cache that can't be written, for messages."""
    return f"set {CACHE} to a folder {'with space' if error.errno in DISK_FULL else 'that can be written'}"


@contextmanager
def locked(path: Path, work: str, *, stays: bool = True) -> Iterator[Callable[[str], None]]:
    """Hold the lock while the block runs; meanwhile the others show what its holder has done. Raises OSError.

    Yields a function that shows how far the work is, to this process's user and those of the others.

    Args:
        path: Of the lock's file, whose folder exists.
        work: For messages.
        stays: Whether the file is there afterwards, too.
    """
    handle, is_held = _opened(path), False
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
        while not is_held:
            while not _try_lock(handle):
                show(os.pread(handle, 200, 0).decode(errors="replace") or "begun by another process")
                time.sleep(_POLL_S)
            is_held = is_same_file(path, handle)
            if not is_held:  # the last holder has removed it
                path.parent.mkdir(parents=True, exist_ok=True)
                removed, handle = handle, _opened(path)
                os.close(removed)
        yield publish
        with suppress(OSError):
            os.ftruncate(handle, 0)
    finally:
        if is_held and not stays:
            forget(path)
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
