"""The snapshots in the memory of several hosts: which of them the run may resume from, and how a rank reads them.

    rank 0     asks all hosts for their parts --> whole? of this run's course? --> all ranks
    each rank  reads its shards from its own host's memory, or over the network from a host that has them

A snapshot that an attempt has taken after the step at which a later attempt resumed is no part of the run's course.
"""

from __future__ import annotations

import io
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from lockstep.checkpoint.host_parts import COPIES, OWN, HostPart, JointSnapshot, parts_in, whole_snapshots
from lockstep.checkpoint.local import LocalFile
from lockstep.checkpoint.manifest import joined, shard_file
from lockstep.checkpoint.storage import MANIFEST
from lockstep.core.ranks import MEMORIES
from lockstep.launch.host_protocol import job_key
from lockstep.launch.meeting import TOKEN
from lockstep.launch.memory_copying import REPORTS
from lockstep.launch.memory_serving import Address, RemoteMemory
from lockstep.monitor.attempts import Attempt, read_attempts

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from lockstep.checkpoint.storage import StoredFile

_THREADS = 16
_log = logging.getLogger("lockstep")


class HostMemories:
    """The memory of all hosts of a run, as seen from one of them.

    Args:
        folder: This host's; None: it has no memory for files.
        node: This host's number.
        addresses: Where launchers serve their hosts' memory.
    """

    def __init__(self, folder: Path | None, node: int, addresses: Sequence[Address], job_id: str | None) -> None:
        self.node = node
        self.addresses = addresses
        self._folder = folder
        self._key = job_key(os.environ.get(TOKEN, ""), job_id or "")

    @classmethod
    def of_ranks(cls, environ: Mapping[str, str], folder: Path | None, job_id: str | None) -> HostMemories | None:
        """Return those that a rank's launcher has named; None: the run isn't one of several hosts."""
        if MEMORIES not in environ:
            return None
        named = json.loads(environ[MEMORIES])
        return cls(folder, named["node"], [(host, port) for host, port in named["addresses"]], job_id)

    def whole_snapshots(self, run_folder: Path, run: str) -> list[JointSnapshot]:
        """Return the snapshots that the hosts have together and that the run may resume from, the newest first."""
        with ThreadPoolExecutor(_THREADS) as pool:
            parts = [*pool.map(self._parts, range(len(self.addresses)))]
        return whole_snapshots(parts, run, validity(read_attempts(run_folder)))

    def open(self, holders: Sequence[tuple[int, str]], name: str) -> StoredFile:
        """Open a file on one of the hosts that have it, this one if possible. Raises OSError.

        Args:
            holders: Numbers of hosts, and the place in their memory.
        """
        failure: OSError = FileNotFoundError("no host has it")
        for host, place in sorted(holders, key=lambda holder: (holder[0] != self.node, holder[1] != OWN)):
            try:
                if host == self.node and self._folder is not None:
                    return LocalFile(self._folder / place / name)
                return _RemoteFile(RemoteMemory(self.addresses[host], self._key), place, name)
            except OSError as error:
                failure = OSError(error.strerror or str(error))
        raise failure

    def fetch_reports(self, snapshot: JointSnapshot) -> None:
        """Take over the reports of rank 0's last updates, if another host has them (`monitor.report_buffer`)."""
        holders = snapshot.holders[0]
        if self._folder is None or (self.node, OWN) in holders:
            return
        for name in REPORTS:
            for host, place in holders:
                path = f"{snapshot.name}/{name}" if place == COPIES else name
                with suppress(OSError):
                    data = content(self.open([(host, place if place == COPIES else "")], path))
                    (self._folder / name).write_bytes(data)
                    break

    def _parts(self, host: int) -> list[HostPart]:
        if host == self.node:
            return parts_in(self._folder) if self._folder is not None else []
        try:
            with RemoteMemory(self.addresses[host], self._key) as memory:
                return memory.parts()
        except OSError as error:
            place = "{}:{}".format(*self.addresses[host])
            _log.warning("the snapshots in memory of the host at %s can't be read: %s", place, error)
            return []


def attempt_id(number: int, attempt: Attempt) -> str:
    """Return what identifies an attempt of a run, the `number`th."""
    return f"{number}-{attempt.began:.3f}"


def validity(attempts: Sequence[Attempt]) -> Callable[[HostPart], bool]:
    """Return whether parts are of the course that led to the last of these attempts."""
    limits: dict[str, float] = {}
    limit = float("inf")
    for number, attempt in reversed([*enumerate(attempts, 1)]):
        limits[attempt_id(number, attempt)] = limit
        limit = min(limit, attempt.step)
    return lambda part: part.step <= limits.get(part.attempt, -1)


class HostsStorage:
    """Reads snapshots that hosts have together, as checkpoints.

    Args:
        run: The id of the run.
    """

    def __init__(self, memories: HostMemories, snapshots: Sequence[JointSnapshot], run: str) -> None:
        self._memories = memories
        self._snapshots = {snapshot.name: snapshot for snapshot in snapshots}
        self.run = run

    @property
    def place(self) -> str:
        return f"the memory of {len(self._memories.addresses)} hosts"

    def names(self) -> list[str]:
        return sorted(self._snapshots)

    def open(self, name: str, file: str) -> StoredFile:
        holders = self._snapshots[name].holders
        if file == MANIFEST:
            return _Content(self._manifest(name))
        ranks = {shard_file(rank): rank for rank in range(len(holders))}
        return self._memories.open(holders[ranks[file]], f"{name}/{file}")

    def read_lock(self, name: str) -> AbstractContextManager[None]:
        return nullcontext()

    def delete(self, name: str) -> bool:
        """Leave it out: each host removes its parts when the run has begun."""
        return self._snapshots.pop(name, None) is not None

    def _manifest(self, name: str) -> bytes:
        """Return the manifest, made from one part for each rank."""
        parts: dict[tuple[int, str], bytes] = {}
        for holders in self._snapshots[name].holders:
            if not any(holder in parts for holder in holders):
                file = self._memories.open(holders[:1], f"{name}/{MANIFEST}")
                parts[holders[0]] = content(file)
        return joined([*parts.values()])


class _RemoteFile:
    """A file in the memory of another host."""

    def __init__(self, memory: RemoteMemory, place: str, name: str) -> None:
        self._memory = memory
        self._lock = Lock()
        try:
            self.size = memory.open(place, name)
        except OSError:
            memory.close()
            raise

    def read(self, offset: int, into: memoryview) -> None:
        with self._lock:
            self._memory.read(offset, into)

    def close(self) -> None:
        self._memory.close()


class _Content:
    """A file whose bytes are here."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.size = len(data)

    def read(self, offset: int, into: memoryview) -> None:
        if io.BytesIO(self._data[offset:]).readinto(into) < len(into):
            raise OSError("the file ends")

    def close(self) -> None:
        pass


def content(file: StoredFile) -> bytes:
    """Return all bytes of a file, and close it. Raises OSError."""
    data = bytearray(file.size)
    try:
        file.read(0, memoryview(data))
    finally:
        file.close()
    return bytes(data)
