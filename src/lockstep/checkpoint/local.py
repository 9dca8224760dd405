"""Checkpoints in a folder of a file system.

checkpoints/step-00000240/           published: renamed once all in it was on the disk
           /owner.json               the run that owns them
           /.draft-step-00000480/    being written
           /broken-step-00000360/    moved aside
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TypeVar
from weakref import WeakSet

from lockstep.checkpoint.storage import MANIFEST, MOVED_ASIDE, OWNER, Owner, owner_bytes, read_owner
from lockstep.core.errors import RunFailed
from lockstep.core.files import exists_anew, flush, is_same_file

_LOCK = ".lock"
_PUBLISHED, _DRAFT, _DELETED, _MARKER = "step-", ".draft-", ".deleted-", ".witness-"
_CHUNK_BYTES = 2**24
_GONE = {
    number
    for number, name in errno.errorcode.items()
    if name
    in (
        "EIO", "ESTALE", "ETIMEDOUT", "EREMOTEIO", "EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH", "ENOTCONN",
        "ECONNREFUSED", "ECONNRESET", "ECONNABORTED", "ESHUTDOWN", "ENODEV", "ENXIO", "EROFS", "ENOLINK", "EPROTO",
    )
}  # fmt: skip
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.1, 5.0
_R = TypeVar("_R")
_log = logging.getLogger("lockstep.checkpoint")


class LocalStorage:
    """A folder, made when it is first written to.

    Args:
        run: Id of the run that owns it; None: the one in `owner.json`.
        retry_seconds: How long saves and loads are retried while the file system is gone.
    """

    def __init__(
        self, folder: Path, run: str | None = None, draft_prefix: str = _DRAFT, *, retry_seconds: float = 0.0
    ) -> None:
        self._folder = folder
        self._retry_seconds = retry_seconds
        self._run = run
        self._draft_prefix = draft_prefix
        self._claimed: int | None = None
        self._is_owned = False  # by `set_owner`: it isn't made again

    @property
    def run(self) -> str | None:
        owner = self.owner() if self._run is None else None
        return owner.run if owner is not None else self._run

    def owner(self) -> Owner | None:
        return read_owner(lambda: LocalFile(self._folder / OWNER))

    def set_owner(self, owner: Owner) -> None:
        self._run = owner.run
        if self.owner() != owner:  # a full disk could not take it again
            self._make()
            new = self._folder / f"{_MARKER}{OWNER}"
            _write_durably(new, memoryview(owner_bytes(owner)))
            new.rename(self._folder / OWNER)
            flush(self._folder)
        self._is_owned = True

    @property
    def place(self) -> str:
        return str(self._folder)

    def names(self) -> list[str]:
        folder = self._folder
        entries = self.again(lambda: [entry.name for entry in folder.iterdir()] if folder.is_dir() else [], folder)
        return sorted(name for name in entries if name.startswith(_PUBLISHED))

    def moved_aside(self) -> dict[str, int]:
        if not self._folder.is_dir():
            return {}
        return {
            entry.name: sum(file.stat().st_size for file in entry.rglob("*") if file.is_file())
            for entry in sorted(self._folder.iterdir())
            if MOVED_ASIDE.fullmatch(entry.name) and entry.is_dir()
        }

    def begin(self, name: str) -> LocalDraft:
        draft = self._folder / f"{self._draft_prefix}{name}"

        def make() -> None:
            self._make()
            draft.mkdir(exist_ok=True)

        self.again(make, draft)
        return LocalDraft(self, draft, self._folder / name)

    def with_separate_drafts(self) -> LocalStorage:
        storage = LocalStorage(self._folder, self._run, f"{_DRAFT}rescue-", retry_seconds=self._retry_seconds)
        storage._is_owned = self._is_owned
        return storage

    @contextlib.contextmanager
    def try_lock(self, name: str) -> Iterator[bool]:
        self._make()
        lock = self._folder / f"{_MARKER}{name}"
        try:
            lock.mkdir()
        except FileExistsError:
            yield False
            return
        try:
            yield True
        finally:
            _remove(lock)

    def open(self, name: str, file: str) -> LocalFile:
        path = self._folder / name / file
        return self.again(lambda: LocalFile(path, self._retry_seconds), path)

    def again(self, call: Callable[[], _R], place: Path) -> _R:
        """Return `call()`, repeated while the file system is gone."""
        return repeated(call, self._retry_seconds, place)

    def replace_manifest(self, name: str, manifest: bytes) -> None:
        new, target = self._folder / f"{self._draft_prefix}{name}-{MANIFEST}", self._folder / name / MANIFEST

        def replace() -> None:
            _write_durably(new, memoryview(manifest))
            new.rename(target)
            flush(target.parent)

        self.again(replace, target)

    def delete(self, name: str) -> None:
        deleted = self._folder / f"{_DELETED}{name}"
        _remove(deleted)
        (self._folder / name).rename(deleted)
        _remove(deleted)

    def move_aside(self, name: str, prefix: str) -> str:
        target, number = self._folder / f"{prefix}-{name}", 2
        while target.exists():
            target, number = self._folder / f"{prefix}-{name}-{number}", number + 1
        (self._folder / name).rename(target)
        flush(self._folder)
        return str(target)

    def claim(self) -> bool:
        self.again(self._make, self._folder)
        others = [other._claimed for other in _claims if other is not self and other._claimed is not None]
        if any(is_same_file(self._folder / _LOCK, handle) for handle in others):
            return False
        handle = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # granted again to the process that holds it
        except (BlockingIOError, PermissionError):
            os.close(handle)
            return False
        except OSError:  # no locks on this file system: no process is kept out
            pass
        if self._claimed is not None:
            os.close(self._claimed)
        self._claimed = handle  # closing it would release the lock
        _claims.add(self)
        return True

    def release(self) -> None:
        handle, self._claimed = self._claimed, None
        _claims.discard(self)
        if handle is not None:
            os.close(handle)

    def remove_stale_drafts(self) -> None:
        with contextlib.suppress(OSError):
            for entry in list(self._folder.iterdir()):
                if entry.name.startswith((_DRAFT, _DELETED, _MARKER)):
                    _remove(entry)

    def has_marker(self, name: str) -> bool:
        return exists_anew(self._folder / f"{_MARKER}{name}")

    def _make(self) -> None:
        """Make the folder, and flush the names that lead to it: a checkpoint in it survives a power failure."""
        if self._is_owned and not exists_anew(self._folder / OWNER):
            raise RunFailed(f"{self._folder} was deleted or moved during the run; move it back to save there")
        if self._folder.is_dir():
            return
        missing = [self._folder, *(parent for parent in self._folder.parents if not parent.is_dir())]
        self._folder.mkdir(parents=True, exist_ok=True)
        for folder in reversed(missing):
            flush(folder.parent)
        flush(missing[-1].parent.parent)  # a run's own folder has just been made too


class LocalDraft:
    """A folder beside the published ones, on the same file system, with a prefix to its name."""

    def __init__(self, storage: LocalStorage, draft: Path, target: Path) -> None:
        self._again = storage.again
        self._draft = draft
        self._target = target

    def write(self, file: str, *pieces: memoryview) -> None:
        path = self._draft / file
        self._again(lambda: _write_durably(path, *pieces), path)

    def read(self, file: str) -> bytes:
        return self._again((self._draft / file).read_bytes, self._draft / file)

    def remove(self, file: str) -> None:
        (self._draft / file).unlink()

    def publish(self, manifest: bytes) -> None:
        self._again(lambda: self._publish(manifest), self._target)

    def _publish(self, manifest: bytes) -> None:
        _write_durably(self._draft / MANIFEST, memoryview(manifest))
        flush(self._draft)
        if self._target.exists():
            raise FileExistsError(f"{self._target} exists")
        self._draft.rename(self._target)
        try:
            flush(self._target.parent)
        except OSError:  # a power failure may still undo the rename, so the checkpoint must not be visible
            self._target.rename(self._draft)
            raise

    def discard(self) -> None:
        _remove(self._draft)


class LocalFile:
    """A file open for reading. Raises OSError, also unless it is a regular file: a pipe would block its reader."""

    def __init__(self, path: Path, retry_seconds: float = 0.0) -> None:
        self._path = path
        self._retry_seconds = retry_seconds
        self._handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        status = os.fstat(self._handle)
        self.size = status.st_size
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise OSError("it is not a file")

    def read(self, offset: int, into: memoryview) -> None:
        filled = 0
        while filled < len(into):
            part, at = into[filled:], offset + filled
            num_bytes = repeated(partial(os.preadv, self._handle, [part], at), self._retry_seconds, self._path)
            if num_bytes == 0:
                raise OSError(f"it ends at byte {offset + filled:,}, {len(into) - filled:,} bytes too early")
            filled += num_bytes

    def close(self) -> None:
        with contextlib.suppress(OSError):  # everything has been read
            os.close(self._handle)


_claims: WeakSet[LocalStorage] = WeakSet()  # of this process; the kernel knows only that the process has a lock
os.register_at_fork(after_in_child=_claims.clear)  # which has no locks


def _write_durably(path: Path, *pieces: memoryview) -> None:
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
    try:
        for piece in pieces:
            written = 0
            while written < len(piece):
                written += os.write(handle, piece[written : written + _CHUNK_BYTES])
        os.fsync(handle)
    finally:
        os.close(handle)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def repeated(call: Callable[[], _R], seconds: float, place: object) -> _R:
    """Return `call()`, repeated while its file system is gone (not if it is full). Raises OSError."""
    began, pause = time.monotonic(), _FIRST_PAUSE_S
    while True:
        try:
            return call()
        except OSError as error:
            if error.errno not in _GONE or time.monotonic() - began + pause > seconds:
                raise
            if pause == _FIRST_PAUSE_S:
                reason = error.strerror or str(error)
                _log.warning("%s: %s; retrying for %g s (checkpoint.retry_seconds)", place, reason, seconds)
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
