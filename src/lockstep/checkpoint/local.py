"""Checkpoints in a folder of a file system.

checkpoints/
├── step-00000240/                   published: renamed once all in it was on the disk
│   ├── manifest.json
│   └── rank-00000.safetensors
├── owner.json                       whose checkpoints these are
├── .draft-step-00000480/            being written
└── broken-step-00000360/            set aside
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

from lockstep.checkpoint import ownership
from lockstep.checkpoint.ownership import OWNER, Owner
from lockstep.checkpoint.storage import ASIDE, MANIFEST, MovedAside, read_whole
from lockstep.core.files import flush, is_missing, is_same_file

_LOCK = ".lock"
_PUBLISHED, _DRAFT, _DELETED, _WITNESS = "step-", ".draft-", ".deleted-", ".witness-"
_RESCUE = f"{_DRAFT}rescue-"
_WRITE = 2**24  # bytes at a time


class LocalStorage:
    """A folder. It is made when it is first written to.

    Args:
        run: id of the run that is known to own it; None: the one that `owner.json` names.
        draft: what the names of drafts begin with.
    """

    def __init__(self, folder: Path, run: str | None = None, draft: str = _DRAFT) -> None:
        self._folder = folder
        self._run = run
        self._draft = draft
        self._claimed: int | None = None

    @property
    def run(self) -> str | None:
        if self._run is not None:
            return self._run
        owner = self.owner()
        return owner.run if owner is not None else None

    def owner(self) -> Owner | None:
        try:
            source = LocalFile(self._folder / OWNER)
            try:
                return ownership.from_bytes(read_whole(source, ownership.MOST_BYTES))
            finally:
                source.close()
        except OSError:
            return None

    def set_owner(self, owner: Owner) -> None:
        self._run = owner.run
        if self.owner() == owner:  # a disk that is full has no room to say the same again
            return
        self._make()
        new = self._folder / f"{_WITNESS}{OWNER}"
        _write_durably(new, memoryview(ownership.to_bytes(owner)))
        new.rename(self._folder / OWNER)
        flush(self._folder)

    @property
    def place(self) -> str:
        return str(self._folder)

    def names(self) -> list[str]:
        if not self._folder.is_dir():
            return []
        return sorted(entry.name for entry in self._folder.iterdir() if entry.name.startswith(_PUBLISHED))

    def moved_aside(self) -> list[MovedAside]:
        if not self._folder.is_dir():
            return []
        entries = sorted(entry for entry in self._folder.iterdir() if ASIDE.fullmatch(entry.name) and entry.is_dir())
        sizes = (sum(file.stat().st_size for file in entry.rglob("*") if file.is_file()) for entry in entries)
        return [MovedAside(entry.name, size) for entry, size in zip(entries, sizes, strict=True)]

    def begin(self, name: str) -> LocalDraft:
        draft = self._folder / f"{self._draft}{name}"
        self._make()
        draft.mkdir(exist_ok=True)
        return LocalDraft(draft, self._folder / name)

    def with_separate_drafts(self) -> LocalStorage:
        return LocalStorage(self._folder, self._run, _RESCUE)

    @contextlib.contextmanager
    def try_lock(self, name: str) -> Iterator[bool]:
        mark = self._folder / f"{_WITNESS}{name}"
        try:
            mark.mkdir()
        except FileExistsError:
            yield False
            return
        try:
            yield True
        finally:
            _remove(mark)

    def is_locked(self, name: str) -> bool:
        return (self._folder / f"{_WITNESS}{name}").exists()

    def open(self, name: str, file: str) -> LocalFile:
        return LocalFile(self._folder / name / file)

    @contextlib.contextmanager
    def read_lock(self, name: str) -> Iterator[None]:
        try:
            handle = _open_file(self._folder / name / MANIFEST)
        except OSError:  # who reads will say what is wrong
            yield
            return
        try:
            with contextlib.suppress(OSError):  # a file system that can't lock: then keep_last must be large enough
                fcntl.flock(handle, fcntl.LOCK_SH)
            yield
        finally:
            _close_what_was_read(handle)

    def delete(self, name: str) -> bool:
        path = self._folder / name
        if _is_being_read(path / MANIFEST):
            return False
        gone = self._folder / f"{_DELETED}{name}"
        _remove(gone)
        path.rename(gone)
        _remove(gone)
        return True

    def move_aside(self, name: str, why: str) -> str:
        target, number = self._folder / f"{why}-{name}", 2
        while target.exists():
            target, number = self._folder / f"{why}-{name}-{number}", number + 1
        (self._folder / name).rename(target)
        flush(self._folder)
        return str(target)

    def claim(self) -> bool:
        self._make()
        handle = os.open(self._folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)  # a process's own, however often it asks
        except (BlockingIOError, PermissionError):
            os.close(handle)
            return False
        except OSError:  # a file system that can't lock: then nobody is kept out
            pass
        if self._claimed is not None:
            os.close(self._claimed)
        self._claimed = handle  # closing it would give the lock back
        return True

    def is_held(self) -> bool:
        if self._claimed is None:
            return True
        return is_same_file(self._folder / _LOCK, self._claimed) and not is_missing(self._folder / OWNER)

    def remove_stale_drafts(self) -> None:
        with contextlib.suppress(OSError):
            for entry in list(self._folder.iterdir()):
                if entry.name.startswith((_DRAFT, _DELETED, _WITNESS)):
                    _remove(entry)

    @contextlib.contextmanager
    def leave_marker(self, token: str) -> Iterator[None]:
        self._make()
        left = self._folder / f"{_WITNESS}{token}"
        left.touch()
        try:
            yield
        finally:
            left.unlink(missing_ok=True)

    def has_marker(self, token: str) -> bool:
        return (self._folder / f"{_WITNESS}{token}").exists()

    def _make(self) -> None:
        """The folder, and the names that lead to it, are on the disk then: what is published in it can be found."""
        if self._folder.is_dir():
            return
        made = [self._folder, *(above for above in self._folder.parents if not above.is_dir())]
        self._folder.mkdir(parents=True, exist_ok=True)
        for folder in reversed(made):
            flush(folder.parent)
        flush(made[-1].parent.parent)  # a run's own folder has just been made too


class LocalDraft:
    """A folder beside the published ones, on the same file system, under a name that is no checkpoint's."""

    def __init__(self, draft: Path, target: Path) -> None:
        self._draft = draft
        self._target = target

    def write(self, file: str, data: memoryview) -> None:
        _write_durably(self._draft / file, data)

    def read(self, file: str) -> bytes:
        return (self._draft / file).read_bytes()

    def remove(self, file: str) -> None:
        (self._draft / file).unlink()

    def publish(self, manifest: bytes) -> None:
        _write_durably(self._draft / MANIFEST, memoryview(manifest))
        flush(self._draft)
        if self._target.exists():
            raise FileExistsError(f"{self._target} exists")
        self._draft.rename(self._target)
        try:
            flush(self._target.parent)
        except OSError:  # it may be gone after a power failure, so it must not pass for one that is there
            self._target.rename(self._draft)
            raise

    def discard(self) -> None:
        _remove(self._draft)


class LocalFile:
    """A file that is there already."""

    def __init__(self, path: Path) -> None:
        self._handle = _open_file(path)
        self.size = os.fstat(self._handle).st_size

    def read(self, offset: int, into: memoryview) -> None:
        filled = 0
        while filled < len(into):
            got = os.preadv(self._handle, [into[filled:]], offset + filled)
            if got == 0:
                raise OSError(f"it ends at byte {offset + filled:,}, where {len(into) - filled:,} more should be")
            filled += got

    def close(self) -> None:
        _close_what_was_read(self._handle)


def _write_durably(path: Path, data: memoryview) -> None:
    """Write a file and flush it; what an earlier write left there is overwritten."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o644)
    try:
        written = 0
        while written < len(data):
            written += os.write(handle, data[written : written + _WRITE])
        os.fsync(handle)
    finally:
        os.close(handle)


def _open_file(path: Path) -> int:
    """To be read. Raises OSError, also for what is no file: a pipe would keep its reader waiting for ever."""
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    if stat.S_ISREG(os.fstat(handle).st_mode):
        return handle
    os.close(handle)
    raise OSError("it is not a file")


def _close_what_was_read(handle: int) -> None:
    with contextlib.suppress(OSError):  # all that was wanted has been read
        os.close(handle)


def _is_being_read(manifest: Path) -> bool:
    try:
        handle = _open_file(manifest)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)
