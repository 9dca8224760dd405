"""The working copy of a run whose folder is in a bucket; its checkpoints alone are only in the bucket.

s3://bucket/digits/config.yaml, metrics.jsonl, logs/, model/, ...     the run
~/.cache/lockstep/runs/digits-5d41402a/                               its working copy
~/.cache/lockstep/runs/digits-5d41402a.json                           the address, and what is equal in both

fetch      bucket --> working copy, before an attempt begins: the bucket's state is the run's, but for longer logs
publish    working copy --> bucket, what has changed; summary.json, which marks the run as finished, last
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from lockstep.core.cache_files import cache_folder, cache_remedy, locked
from lockstep.core.errors import ConfigError, RunFailed
from lockstep.core.files import MAX_JSON_BYTES, forget, naming, read_bounded, write_atomically
from lockstep.launch.hang_report import REPORT
from lockstep.monitor.folder import CHECKPOINTS, CONFIG, LOGS, SUMMARY
from lockstep.monitor.run_lock import LOCK, open_lock
from lockstep.stores.addresses import checked_address, checked_run_place_text, is_address, parts_of
from lockstep.stores.opening import RETRY_SECONDS
from lockstep.training.store_lock import StoreLock

_KIND = "runs"
_BLOCK_BYTES = 2**24
LogMarks = dict[str, list[int] | None]
WEIGHTS = "model/"  # complete when they appear, and large


class WorkingCopy:
    """A local folder with what a bucket has of a run, but for the checkpoints.

    Args:
        address: Of the run.
        token: Of the lock, which every publication checks; None: this process only reads.
    """

    def __init__(self, address: str, token: str | None = None, retry_seconds: float = RETRY_SECONDS) -> None:
        from lockstep.stores.s3 import S3Store

        try:
            self.address = checked_run_place_text(address)
        except ValueError as error:
            raise ConfigError(str(error)) from None
        self.folder = working_folder(self.address)
        self._store = S3Store(self.address, retry_seconds)
        self.lock = StoreLock(self._store, token)

    # --- from the bucket ------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        """Return the names of the run's files in the bucket. Raises OSError."""
        return list(self._tags())

    def has(self, name: str) -> bool:
        """Return whether the bucket has a file of the run. Raises OSError."""
        return name in self._store.sizes(name)

    def fetch(self) -> None:
        """Make the working copy equal to what the bucket has; a log that is longer here stays. Raises OSError."""
        with self._exclusive() as known:
            tags = self._tags()
            for name, tag in tags.items():
                path = self.folder / name
                stat = _stat(path)
                if stat and known.get(name) == {"tag": tag, "stat": stat}:
                    continue
                if stat and _is_log(name) and stat[0] > self._store.size(name):
                    known[name] = {"tag": tag, "stat": None}  # so that it is published
                else:
                    self._download(name, path)
                    known[name] = {"tag": tag, "stat": _stat(path)}
            for name in _files(self.folder):
                if name not in tags and not _is_log(name):
                    (self.folder / name).unlink()
            for name in [name for name in known if name not in tags]:
                del known[name]

    def read_into(self, folder: Path, names: Sequence[str]) -> None:
        """Download some files, as far as they exist, to another folder. Raises OSError."""
        for name in [name for name in self.names() if name in names]:
            self._download(name, folder / name)

    def is_running(self) -> bool:
        """Return whether a process of this machine trains the run: its working copy is newer than the bucket then."""
        if not (self.folder / LOCK).exists():
            return False
        handle, holder = open_lock(self.folder)
        os.close(handle)
        return holder is not None

    def _tags(self) -> dict[str, str]:
        """Return the tags of the run's files in the bucket. Raises OSError, also for a name that isn't a file's."""
        tags = self._store.tags("")
        ours = {name: tag for name, tag in tags.items() if not name.startswith(f"{CHECKPOINTS}/") and name != LOCK}
        for name in ours:
            if str(PurePosixPath(name)) != name or name.startswith(("/", ".")) or ".." in name.split("/"):
                raise OSError(None, "this is not the name of a run's file; remove it", f"{self.address}/{name}")
        return ours

    def _download(self, name: str, path: Path) -> None:
        size = self._store.size(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(f".{path.name}.new")
        try:
            with naming(path), draft.open("wb") as file:
                for start in range(0, size, _BLOCK_BYTES):
                    block = bytearray(min(_BLOCK_BYTES, size - start))
                    self._store.read(name, start, memoryview(block))
                    file.write(block)
            draft.replace(path)
        finally:
            forget(draft)

    # --- to the bucket --------------------------------------------------------------------------------------------

    def publish(self, is_removed: Callable[[str], bool] = lambda name: False) -> None:
        """Upload what has changed of a run that this process or its parent trains.

        Args:
            is_removed: Whether a file that is missing here was removed by the run, and not with the cache. All were, if
                the run was refused before it started.

        Raises:
            OSError: The store fails.
            RunFailed: Another process trains the run by now.
        """
        with self._exclusive() as known:
            if not self.lock.is_held():
                raise RunFailed(f"another process trains the run in {self.address} now")
            files = {name: _stat(self.folder / name) for name in _files(self.folder)}
            is_unstarted = CONFIG not in known and CONFIG not in files
            missing = [name for name in known if name not in files]
            gone = sorted(
                (each for each in missing if is_unstarted or is_removed(each)), key=lambda each: each != SUMMARY
            )
            if SUMMARY in gone:  # the run continues, so it isn't finished
                self._remove(gone[:1], known)
            for name in sorted(files, key=lambda name: (name == SUMMARY, not name.startswith(WEIGHTS), name)):
                if files[name] is not None and known.get(name, {}).get("stat") != files[name]:
                    self._upload(name)
                    known[name] = {"tag": "", "stat": files[name]}
            self._remove([name for name in gone if name in known], known)

    def publish_logs(self, before: LogMarks) -> None:
        """Upload the logs that this host, which has no lock, has written since their marks. Raises OSError."""
        for name, mark in log_marks(self.folder).items():
            if mark != before.get(name):
                self._upload(name)

    def _upload(self, name: str) -> None:
        path = self.folder / name
        with suppress(FileNotFoundError), path.open("rb") as file:
            if name.startswith(WEIGHTS) and os.fstat(file.fileno()).st_size:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as memory, memoryview(memory) as data:
                    self._store.write(name, data)
            else:
                self._store.write(name, memoryview(file.read()))

    def _remove(self, names: list[str], known: dict[str, Any]) -> None:
        self._store.delete(names)
        for name in names:
            del known[name]

    @contextmanager
    def _exclusive(self) -> Iterator[dict[str, Any]]:
        """Yield the record of each file that is equal in both; no other process changes either meanwhile."""
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        record = _record_of(self.folder)
        with locked(self.folder.with_name(f"{self.folder.name}.lock"), f"the working copy of {self.address}"):
            known = _read_record(record).get("files", {})
            try:
                yield known
            finally:
                write_atomically(record, json.dumps({"address": self.address, "files": known}))


# --- where it is ------------------------------------------------------------------------------------------------------


def working_folder(address: str) -> Path:
    """Return the folder of the working copy of a run in a bucket."""
    _, bucket, prefix = parts_of(address)
    name = re.sub(r"[^A-Za-z0-9._-]", "-", prefix.rpartition("/")[2] or bucket).lstrip(".")[:64] or "run"
    return cache_folder(_KIND).absolute() / f"{name}-{hashlib.sha256(address.encode()).hexdigest()[:8]}"


def stored_at(run: Path) -> str | None:
    """Return the address of the run of which a folder is the working copy; None: it is a run's own folder."""
    if run.absolute().parent != cache_folder(_KIND).absolute():
        return None
    address = _read_record(_record_of(run.absolute())).get("address")
    return address if isinstance(address, str) and working_folder(address) == run.absolute() else None


def checkpoints_address(address: str) -> str:
    """Return the address of the checkpoints of a run in a bucket."""
    return f"{address}/{CHECKPOINTS}"


def place_of(run: Path) -> str:
    """Return the address or the path of a run, given its folder."""
    return stored_at(run) or str(run)


def owns(run: Path, place: str) -> bool:
    """Return whether a place has the checkpoints of the run in a bucket of which a folder is the working copy.

    The answer is the same on all hosts, and needs no file.
    """
    address, _, last = place.rpartition("/")
    return last == CHECKPOINTS and is_address(address) and working_folder(address).name == run.name


def is_stored_run(address: str) -> bool:
    """Return whether there is a run's folder at an address. Raises ConfigError if the store fails."""
    if parts_of(checked_address(address))[0] != "s3":
        return False
    with config_error_of(address):
        return WorkingCopy(address).has(CONFIG)


def fetched(address: str) -> Path:
    """Return a working copy to read from. Raises ConfigError if there is no run at the address."""
    with config_error_of(address):
        copy = WorkingCopy(address)
        if not copy.has(CONFIG):
            raise ConfigError(f"there is no run in {copy.address}: it has no {CONFIG}; name the prefix of a run")
        if not copy.is_running():
            copy.fetch()
    return copy.folder


@contextmanager
def config_error_of(address: str) -> Iterator[None]:
    """Turn an OSError of a store, or of the working copy, into a ConfigError."""
    try:
        yield
    except OSError as error:
        is_local = isinstance(error.filename, str) and not error.filename.startswith("s3://")
        remedy = f"; {cache_remedy(error)}" if is_local else ""
        raise ConfigError(f"{error.filename or address}: {error.strerror or error}{remedy}") from error


def _record_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.json")


def _read_record(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError):
        record = json.loads(read_bounded(path, MAX_JSON_BYTES))
        if isinstance(record, dict) and isinstance(record.get("files", {}), dict):
            return record
    return {}


def _files(folder: Path) -> list[str]:
    """Return the names of a run's files, without locks, unfinished ones and what is a link."""
    names = []
    for parent, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        inside = Path(parent).relative_to(folder)
        names += [(inside / name).as_posix() for name in files if not name.startswith(".")]
    return sorted(name for name in names if name != LOCK and not (folder / name).is_symlink())


def _is_log(name: str) -> bool:
    """Return whether a file only grows, and no start of the run reads it: not so the records beside the logs."""
    return name.startswith(f"{LOGS}/") and (name.endswith(".log") or name == f"{LOGS}/{REPORT}")


def log_marks(folder: Path) -> LogMarks:
    """Return what changes if one of a run's logs is written: no time, because clocks are set."""
    return {name: _stat(folder / name) for name in _files(folder) if name.startswith(f"{LOGS}/")}


def _stat(path: Path) -> list[int] | None:
    with suppress(OSError):
        status = path.stat()
        return [status.st_size, status.st_mtime_ns, status.st_ino]
    return None
