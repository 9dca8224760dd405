"""Files that are appended to for as long as a run lasts, and may be deleted, moved or replaced meanwhile.

path --> inode 1 <-- handle      as it should be
path     inode 1 <-- handle      deleted or moved: `reopened` writes all that is behind the handle to a new file
path --> inode 2                 replaced: `reopened` continues there
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_CHUNK = 2**20
_APPEND = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW


def append_to(path: Path) -> int:
    """Open a file for appending, made if it isn't there, so that `reopened` can read what is in it. Raises OSError."""
    try:
        return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
    except PermissionError:  # one that may be written and not read
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)


def is_behind(path: Path, handle: int) -> bool:
    """Return whether `path` leads to the file that is open; True if the disk doesn't answer."""
    try:
        status = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return os.path.samestat(status, os.fstat(handle))


def is_missing(path: Path) -> bool:
    """Return whether nothing is at `path`; False if the disk doesn't answer."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def reopened(path: Path, handle: int) -> int:
    """Return a handle for appending to `path`, which no longer leads to the file behind `handle`. Where nothing is,
    the file is made again with all that is behind the handle. Raises OSError."""
    try:
        new = os.open(path, _APPEND | os.O_EXCL, 0o666)
    except FileExistsError:
        return append_to(path)
    try:
        copy_rest(handle, new, 0)
        os.fsync(new)
    except BaseException:
        os.close(new)
        with contextlib.suppress(OSError):
            path.unlink()
        raise
    return new


def copy_rest(source: int, target: int, start: int) -> int:
    """Append what is behind `source` from byte `start` on; return where it ends. Raises OSError."""
    while chunk := os.pread(source, _CHUNK, start):
        start += len(chunk)
        while chunk:
            chunk = chunk[os.write(target, chunk) :]
    return start
