"""The folder in memory that a launcher keeps for its ranks: what is in it survives them, and ends with the launcher.

    /dev/shm/lockstep-1000-3f0c.../       of user 1000's run, by the hash of its folder's path; mode 0700
    |- lock                               held by the launcher and its ranks
    |- attempts                           the run's attempts.jsonl when it was last used
    '- checkpoints/step-00000470/         snapshots

The next start of the same run resumes from the folder of a killed launcher; other runs remove it after an hour.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import stat
import time
from contextlib import suppress
from pathlib import Path

from lockstep.core.files import read_bounded
from lockstep.monitor.folder import ATTEMPTS

ROOT = Path("/dev/shm")
_LOCK, _ATTEMPTS = "lock", "attempts"
_ABANDONED_S = 3600.0
_MOST_BYTES = 2**26


class MemoryFolder:
    """The folder of one launcher, locked until `remove` or `leave`."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock: int | None = lock

    @classmethod
    def make(cls, run: Path, root: Path = ROOT, hosts: int = 0) -> MemoryFolder | None:
        """Return the folder for a run, which the caller has locked; None where there is no memory for files.

        It is empty, unless a launcher of this run was killed and no other attempt has been made since. Of a run on
        several hosts snapshots stay: who reads them checks them. Launchers on one machine have a folder each.
        """
        name = _name_of(run)
        try:
            remove_abandoned(root)
            for number in range(max(1, hosts)):
                path = root / (f"{name}-{number}" if number else name)
                with suppress(FileExistsError):
                    path.mkdir(mode=0o700)
                lock = _locked(path) if is_own(path) else None
                if lock is not None:
                    break
            else:
                return None
            if not hosts and not _is_of_last_attempt(path, run):
                _empty(path)
        except OSError:
            return None
        return cls(path, lock)

    def remove(self) -> None:
        """Remove the folder; nothing happens if that was done."""
        if self._lock is not None:
            ended = self.path.with_name(f"{self.path.name}-ended")
            shutil.rmtree(ended, ignore_errors=True)
            with suppress(OSError):
                self.path.rename(ended)  # what is being copied into it fails, and isn't there again afterwards
            shutil.rmtree(ended, ignore_errors=True)
            self.leave()

    def leave_snapshots(self) -> None:
        """Leave the folder for the next start of the run if it has snapshots; else remove it."""
        if any(self.path.glob("checkpoints/*")):
            self.leave()
        else:
            self.remove()

    def leave(self) -> None:
        """Leave the folder as it is, for the next start of the run."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def left_by(run: Path, root: Path = ROOT) -> Path | None:
    """Return the folder that a killed launcher of a run on one host has left, if the run resumes from it."""
    path = root / _name_of(run)
    with suppress(OSError):
        if is_own(path) and _is_of_last_attempt(path, run):
            return path
    return None


def _name_of(run: Path) -> str:
    return f"{prefix()}{hashlib.sha256(os.fsencode(run.absolute())).hexdigest()[:24]}"


def _is_of_last_attempt(path: Path, run: Path) -> bool:
    return _content(path / _ATTEMPTS) == _content(run / ATTEMPTS)


def note_attempt(folder: Path, run: Path) -> None:
    """Record that the folder's contents belong to the run's last attempt."""
    with suppress(OSError):
        (folder / _ATTEMPTS).write_bytes(_content(run / ATTEMPTS))


def prefix() -> str:
    """Return how the names of this user's folders in memory begin."""
    return f"lockstep-{os.getuid()}-"


def is_own(path: Path) -> bool:
    """Return whether it is a folder of this user that no other can write to."""
    status = path.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.getuid() and not status.st_mode & 0o077


def _locked(path: Path) -> int | None:
    """Return a handle that holds the folder's lock; None if another process has it."""
    handle = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(handle)
        return None
    os.utime(path / _LOCK)
    return handle


def remove_abandoned(root: Path = ROOT) -> None:
    """Remove what this user's launchers have left there more than an hour ago."""
    for path in root.glob(f"{prefix()}*"):
        with suppress(OSError):
            used = max(entry.stat().st_mtime for entry in (path, *path.iterdir(), *path.glob("checkpoints/*")))
            if not is_own(path) or time.time() - used < _ABANDONED_S:
                continue
            if (lock := _locked(path)) is not None:
                shutil.rmtree(path, ignore_errors=True)
                os.close(lock)


def _empty(path: Path) -> None:
    for entry in path.iterdir():
        if entry.name == _LOCK:
            continue
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _content(file: Path) -> bytes:
    try:
        return read_bounded(file, _MOST_BYTES)
    except OSError:
        return b""
