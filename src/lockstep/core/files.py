"""Reads and writes small files, appends to files, and replaces files and folders whole."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path

MAX_JSON_BYTES = 2**24
"""Limit for a JSON file that Lockstep writes beside a run's data; nearly all have a few thousand bytes."""

_HERE, _EXCHANGE = -100, 2  # Linux: AT_FDCWD, RENAME_EXCHANGE


def open_file(path: Path) -> BufferedReader:
    """Open a regular file for reading. Raises OSError for anything else: a pipe would block."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    mode = os.fstat(handle).st_mode
    if stat.S_ISREG(mode):
        return open(handle, "rb")
    os.close(handle)
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise OSError(errno.EINVAL, "it is not a file", str(path))


def read_bounded(path: Path, limit: int) -> bytes:
    """Return the file's bytes. Raises OSError, also if it is larger than `limit` or not a regular file."""
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > limit:
            raise OSError(errno.EFBIG, f"it has {size:,} bytes, and may have {limit:,}", str(path))
        return file.read(limit)


@contextlib.contextmanager
def opened_regular(path: Path) -> Iterator[int]:
    """Open a regular file for reading while the block runs. Raises OSError for anything else."""
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(f"{path} is not a file")
        yield handle
    finally:
        os.close(handle)


def flush(path: Path) -> None:
    """Flush a file's content, or a folder's names, to the disk: a new file needs both. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def exists_anew(path: Path) -> bool:
    """Return whether a path exists now, also on NFS, which caches failed look-ups until the folder is opened."""
    for folder in reversed(path.parents):
        with contextlib.suppress(OSError):
            os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY))
    return path.exists()


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """Add the path to system errors that name no file."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def write_atomically(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Write a file so that it always has the whole old content or the whole new one. Raises OSError.

    Args:
        durable: Also after a power failure; the disk is waited for.
    """
    partial = temporary(path, "new")
    try:
        partial.unlink(missing_ok=True)  # of an earlier process with this id, or of another user
        handle = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        with naming(path), open(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(handle)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_if_changed(path: Path, text: str) -> None:
    """Write a file as `write_atomically`, unless it has this text already. Raises OSError."""
    with contextlib.suppress(OSError):
        if read_bounded(path, MAX_JSON_BYTES) == text.encode():
            return
    write_atomically(path, text)


def forget(path: Path) -> None:
    """Delete a file that a run can do without, if possible."""
    with contextlib.suppress(OSError):
        path.unlink()


def exchanged(first: Path, second: Path) -> bool:
    """Exchange the names of two files or folders at once; False: not possible here. Raises OSError."""
    rename = ctypes.CDLL(None, use_errno=True).renameat2
    if rename(_HERE, os.fsencode(first), _HERE, os.fsencode(second), _EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):  # the kernel or the file system can't
        return False
    raise OSError(number, os.strerror(number), str(first), None, str(second))


@contextlib.contextmanager
def replacing_file(target: Path) -> Iterator[Path]:
    """Yield the path to write to; then replace the target."""
    partial = temporary(target, "new")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()
        mode = partial.stat().st_mode
        yield partial
        partial.chmod(mode)  # a writer may make it readable by its owner alone
        flush(partial)
        partial.replace(target)
        flush(target.parent)
    finally:
        partial.unlink(missing_ok=True)


@contextlib.contextmanager
def replacing_folder(target: Path) -> Iterator[Path]:
    """Yield an empty folder to write to; then replace the target."""
    partial = temporary(target, "new")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        mode = partial.stat().st_mode & 0o666
        yield partial
        for path in (*partial.rglob("*"), partial):
            if path.is_file():
                path.chmod(mode)
            flush(path)
        replace_folder(target, partial)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def replace_folder(target: Path, new: Path) -> None:
    """Replace a folder, which may not exist, by a new one. Raises OSError.

    At any time the target is the old one or the new one, except for a moment on file systems that can't exchange names.
    """
    if not target.exists():
        new.rename(target)
    elif not exchanged(target, new):
        old = temporary(target, "old")
        target.rename(old)
        try:
            new.rename(target)
        except OSError:
            old.rename(target)
            raise
        shutil.rmtree(old, ignore_errors=True)
    flush(target.parent)


def temporary(target: Path, suffix: str) -> Path:
    """Return another name for a file or folder, in the same folder, until it is complete."""
    return target.with_name(f".{target.name}.{os.getpid()}.{suffix}")


def append_to(path: Path) -> int:
    """Open a file for appending; create it if it is missing. Raises OSError."""
    return os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)


def append_line(path: Path, line: str) -> None:
    """Append lines to a file; first end a torn one. Raises OSError."""
    handle = append_to(path)
    try:
        size = os.fstat(handle).st_size
        is_torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"  # its writer was killed, or the disk was full
        text = f"{line}\n".encode(errors="replace")
        text = b"\n" + text if is_torn else text
        while text:  # a nearly full disk takes a part, and then raises
            text = text[os.write(handle, text) :]
    finally:
        os.close(handle)


def is_same_file(path: Path, handle: int) -> bool:
    """Return whether `path` is the open file; True if the disk doesn't answer."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(handle))
    except OSError as error:
        return not isinstance(error, FileNotFoundError | NotADirectoryError)


def changed(*files: Path) -> float:
    """Return when the newest of these files was written, in seconds of the epoch; 0 if none is there."""
    times = [0.0]
    for file in files:
        with contextlib.suppress(OSError):
            times.append(file.stat().st_mtime)
    return max(times)
