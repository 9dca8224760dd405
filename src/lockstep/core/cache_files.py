"""The cache folder, with locks so that one process fills it, and drafts.

$LOCKSTEP_CACHE/KIND/...     by default ~/.cache/lockstep (or $XDG_CACHE_HOME/lockstep)
NAME@HOST@PID.part           a draft of NAME: renamed when complete, deleted by the next writer if its own has ended
"""

from __future__ import annotations

import errno
import fcntl
import glob
import os
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lockstep.core.files import changed, flush, forget, is_same_file
from lockstep.core.terminal import echo

CACHE = "LOCKSTEP_CACHE"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_NO_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.EBADF, errno.ENOSYS)
_POLL_S = 0.1
_SHOWN_S = 10.0
_ABANDONED_S = 3600.0


def cache_folder(kind: str) -> Path:
    """Return the folder of a kind of files."""
    if own := os.environ.get(CACHE):
        return Path(own).expanduser() / kind
    root = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(root) if os.path.isabs(root) else Path("~/.cache").expanduser()) / "lockstep" / kind


def cache_remedy(error: OSError) -> str:
    """Return what to do about a file of the cache that can't be written."""
    return f"set {CACHE} to a folder {'with space' if error.errno in DISK_FULL else 'that can be written'}"


@contextmanager
def locked(path: Path, work: str, *, stays: bool = True) -> Iterator[Callable[[str], None]]:
    """Hold the lock while the block runs; meanwhile other processes show what its holder does. Raises OSError.

    Yields a function that shows progress, to this process's user and those that wait.

    Args:
        work: For messages.
        stays: Keep the lock's file afterwards.
    """
    handle, is_held = _opened(path), False
    shown_at = time.monotonic()

    def show(text: str) -> None:
        nonlocal shown_at
        if os.environ.get("LOCAL_RANK", "0") == "0" and time.monotonic() - shown_at > _SHOWN_S:
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
    except PermissionError:  # another user's lock, which can still be waited for
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


# --- drafts ---------------------------------------------------------------------------------------------------------


def draft_of(path: Path) -> Path:
    """Return the name of this process's draft."""
    return path.with_name(f"{path.name}@{socket.gethostname()}@{os.getpid()}.part")


@contextmanager
def whole_folder(entry: Path) -> Iterator[Path]:
    """Yield a draft of a folder; then give it its name, unless another process was first. Raises OSError."""
    remove_abandoned(entry)
    draft = draft_of(entry)
    draft.mkdir()
    try:
        yield draft
        for path in (*draft.iterdir(), draft):
            flush(path)
        try:
            draft.rename(entry)
        except OSError:
            if not entry.is_dir():  # on a file system without locks, another process may be first
                raise
        flush(entry.parent)
    finally:
        remove(draft)


def remove_abandoned(path: Path) -> None:
    """Delete drafts of ended writers, as far as that is possible."""
    for draft in path.parent.glob(f"{glob.escape(path.name)}@*.part"):
        if _is_abandoned(draft):
            remove(draft)


def remove(draft: Path) -> None:
    """Delete a draft, as far as that is possible."""
    if draft.is_dir():
        shutil.rmtree(draft, ignore_errors=True)
    else:
        with suppress(OSError):
            draft.unlink()


def _is_abandoned(draft: Path) -> bool:
    """Return whether a draft's writer has ended; on another machine, if nothing was written for an hour."""
    _, host, number = draft.stem.rsplit("@", 2)
    if host == socket.gethostname() and number.isdecimal():
        return int(number) == os.getpid() or not _is_running(int(number))
    written = changed(*draft.iterdir()) if draft.is_dir() else changed(draft)
    return 0 < written < time.time() - _ABANDONED_S


def _is_running(process: int) -> bool:
    import psutil

    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE  # killed, and its parent doesn't know it yet
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True
