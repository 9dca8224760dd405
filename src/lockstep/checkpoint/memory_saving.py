"""Snapshots of a run's state in memory that outlives its ranks: checkpoints like those on a disk.

    main thread    start: plan, copy what changes | train on ...
    background         copy the rest, hash, write, record; the last rank to have written publishes, and deletes old ones

The ranks of a host share the folder, so no vote is needed: whichever rank finds all records publishes. The newest two
stay. On several hosts each publishes the part of its ranks (`HostPart`) and keeps one more, since another host may
write the next snapshot meanwhile. A run resumes from parts of the same attempt, one for each host's present ranks.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from lockstep.checkpoint import manifest as manifests
from lockstep.checkpoint.local import LocalStorage
from lockstep.checkpoint.manifest import CorruptCheckpoint, shard_file, to_bytes
from lockstep.checkpoint.reading import manifest_bytes
from lockstep.checkpoint.saving import (
    RunMetadata,
    StepMetadata,
    failure_reason,
    manifest_of,
    read_record,
    taken_record,
    write_rank_file,
    write_record,
)
from lockstep.checkpoint.snapshot import Snapshot
from lockstep.checkpoint.storage import Draft, Storage, StoredFile, checkpoint_name, names_by_step
from lockstep.checkpoint.write_plan import SavePlanner
from lockstep.core.errors import RunFailed
from lockstep.core.protocols import Axis
from lockstep.core.records import TrainingState

ATTEMPT = "attempt"
"""Key of a manifest's environment: what identifies the attempt of the run that wrote the part."""


@dataclass(frozen=True, slots=True)
class HostPart:
    """A host's part of a snapshot of `ranks` ranks on all hosts: the manifest's entries of its files, by name."""

    run: str
    attempt: str
    step: int
    ranks: int
    files: Mapping[str, Any]


def parts_in(memory: LocalStorage, ranks: range) -> list[HostPart]:
    """Return the snapshots in a host's memory that have the files of all these ranks."""
    parts = []
    for name in names_by_step(memory.names()).values():
        with suppress(CorruptCheckpoint, KeyError):  # KeyError: other ranks' files
            body = manifests.intact_body(manifest_bytes(memory, name))
            files = {file: body["files"][file] for file in map(shard_file, ranks)}
            parts.append(HostPart(body["run"], body["environment"][ATTEMPT], body["step"], body["ranks"], files))
    return parts


def files_of_whole(
    hosts: Sequence[Sequence[HostPart]], run: str, is_valid: Callable[[str, int], bool]
) -> dict[int, dict[str, Any]]:
    """Return the files of each snapshot that is complete on the hosts together, by step.

    `is_valid` says whether the run may resume from what an attempt wrote at a step.
    """
    whole = {}
    for first in hosts[0]:
        alike = [part for parts in hosts for part in parts if (part.step, part.attempt) == (first.step, first.attempt)]
        files = {name: entry for part in alike if part.run == run for name, entry in part.files.items()}
        if len(files) == first.ranks and is_valid(first.attempt, first.step):
            whole[first.step] = files
    return whole


class WithMemory:
    """Reads checkpoints from this host's memory, which all ranks may share, and otherwise from a storage.

    `names` deletes from memory what the storage has; rank 0 calls it before any rank opens one.
    """

    def __init__(self, storage: Storage, memory: LocalStorage, *, is_shared: bool = True) -> None:
        self._storage = storage
        self._memory = memory
        self._is_shared = is_shared

    @property
    def place(self) -> str:
        return self._storage.place

    @property
    def run(self) -> str | None:
        return self._storage.run

    def names(self) -> list[str]:
        durable = self._storage.names()
        drop(self._memory, lambda step, name: name in durable)
        return [*durable, *self._memory.names()]

    def open(self, name: str, file: str) -> StoredFile:
        return (self._memory if name in self._memory.names() else self._storage).open(name, file)

    def is_near(self, name: str) -> bool:
        """Return whether a checkpoint is in this host's memory, which all ranks share."""
        return self._is_shared and name in self._memory.names()


def drop(memory: LocalStorage, is_dropped: Callable[[int, str], bool]) -> None:
    """Delete the snapshots where `is_dropped(step, name)` is true."""
    for step, name in names_by_step(memory.names()).items():
        if is_dropped(step, name):
            with suppress(OSError):
                memory.delete(name)


_KEPT = 2
_METADATA = "metadata.json"  # of the host's first rank: only rank 0 has the environment


class MemorySaver:
    """Saves snapshots of one run, on one rank. Every rank calls `start` after the same updates.

    Args:
        ranks: This host's, on several hosts; None: all are on this one.

    Attributes:
        attempt: Identifies the attempt of a run on several hosts.
        kept: Number of snapshots that stay.
        failure: Why this rank could not write the last snapshot.
    """

    def __init__(
        self,
        storage: LocalStorage,
        axis: Axis,
        device: torch.device,
        run_metadata: RunMetadata,
        ranks: range | None = None,
    ) -> None:
        self._storage = storage
        self._axis = axis
        self._ranks = ranks or range(axis.size)
        self.attempt = ""
        self.kept = _KEPT + (ranks is not None)
        self._is_on_host = device.type == "cpu"
        self._device = device
        self._run_metadata = run_metadata
        self._planner = SavePlanner(axis)
        self._thread: threading.Thread | None = None
        self._incomplete: Draft | None = None
        self._lost = self._worked = 0.0
        self.failure: str | None = None

    @property
    def seconds(self) -> float:
        """Seconds that the last snapshot has cost: waits of the training, and on a CPU work in the background."""
        return self._lost + self._worked

    @property
    def is_writing(self) -> bool:
        return self._thread is not None and self._thread.is_alive()

    def size(self, state: TrainingState) -> int:
        """Return the bytes of this rank's part of a snapshot; a collective."""
        return self._planner.layout(state.tensors).size

    def start(self, state: TrainingState, metadata: StepMetadata, began: float) -> Callable[[], None]:
        """Start a snapshot of the present state, after the last one; return what to call before the state changes.

        `began` is when training was interrupted for it, as `time.perf_counter` returns it.
        """
        self.finish()
        snapshot = self._planner.snapshot(state, self._device)
        self._thread = threading.Thread(target=self._write, args=(snapshot, metadata), name="snapshot", daemon=True)
        self._thread.start()
        self._lost = time.perf_counter() - began

        def before_update() -> None:
            self._lost += snapshot.before_update()

        return before_update

    def finish(self) -> None:
        """Wait until this rank has written."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _write(self, snapshot: Snapshot, metadata: StepMetadata) -> None:
        began, name = time.thread_time(), checkpoint_name(metadata.step)
        draft: Draft | None = None
        if self._incomplete is not None:
            self._incomplete.discard()
            self._incomplete = None
        try:
            snapshot.complete()
            draft = self._storage.begin(name)
            self._write_rank(draft, snapshot, metadata)
            self._publish_if_complete(draft, name)
            self.failure = None
        except Exception as error:
            self.failure = failure_reason(error)
            self._incomplete = draft
            if draft is not None:
                draft.discard()
        if self._is_on_host:
            self._worked = time.thread_time() - began

    def _write_rank(self, draft: Draft, snapshot: Snapshot, metadata: StepMetadata) -> None:
        record = write_rank_file(draft, snapshot, self._run_metadata.run, metadata.step)
        if self._axis.rank == self._ranks.start:
            own = {ATTEMPT: self.attempt} if self.attempt else {}
            environment = {**self._run_metadata.environment, **metadata.environment, **own}
            text = json.dumps(asdict(replace(metadata, environment=environment)))
            draft.write(_METADATA, memoryview(text.encode()))
        write_record(draft, self._axis.rank, record)

    def _publish_if_complete(self, draft: Draft, name: str) -> None:
        try:
            for rank in reversed(self._ranks):
                read_record(draft, rank)
        except (OSError, RunFailed):  # another rank has not yet written, and will publish; or it has published
            return
        with self._storage.try_lock(name) as is_first:
            if not is_first or name in self._storage.names():
                return
            metadata = StepMetadata(**json.loads(draft.read(_METADATA)))
            draft.remove(_METADATA)
            records = {rank: taken_record(draft, rank) for rank in self._ranks}
            made = manifest_of(self._run_metadata, metadata, records, self._planner.plan, self._axis.size)
            draft.publish(to_bytes(made))
        for old in [*names_by_step(self._storage.names()).values()][: -self.kept]:
            with suppress(OSError):
                self._storage.delete(old)
