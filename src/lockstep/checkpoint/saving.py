"""Saves checkpoints: from the copy of the state to the manifest that makes the checkpoint exist.

    main thread    start: plan, copy what changes |  train on ...             | on_vote: have all ranks settled?
    background         copy the rest, hash, write, flush, report in next vote |   rank 0: publish

Ranks agree through every update's vote: each reports how many of its saves are settled (on the disk, or failed). No
collective runs outside the main thread. One save is in progress at a time. A save that fails costs a warning. A rank
leaves a record of its file, which the manifest takes.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import Any, cast

import torch

from lockstep.checkpoint import hashing
from lockstep.checkpoint import manifest as manifests
from lockstep.checkpoint.hashing import BlockHasher
from lockstep.checkpoint.manifest import FileEntry, GridEntry, Manifest, TensorEntry, amended, shard_file
from lockstep.checkpoint.reading import checked_manifest, manifest_bytes
from lockstep.checkpoint.snapshot import Snapshot
from lockstep.checkpoint.storage import Draft, Storage, checkpoint_name, newest_step
from lockstep.checkpoint.write_plan import SavePlanner, WritePlan
from lockstep.core.deferred_signals import DEFERRAL
from lockstep.core.errors import RunFailed
from lockstep.core.protocols import Axis
from lockstep.core.records import SaveReport, TrainingState


@dataclass(frozen=True, slots=True)
class RunMetadata:
    """The parts of the manifest that all checkpoints of an attempt share."""

    run: str
    config: Mapping[str, Any]
    environment: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """The parts of the manifest that describe the run at a step."""

    step: int
    samples: int
    tokens: int
    state: Mapping[str, Any]
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Save:
    """A save in progress; training waited `lost` seconds for it; `agreed`: all ranks know that all have settled."""

    metadata: StepMetadata
    snapshot: Snapshot
    began: float
    lost: float = 0.0
    draft: Draft | None = None
    record: FileEntry | None = None
    failure: str | None = None
    agreed: bool = False
    thread: threading.Thread | None = None

    def run_in_background(self, target: Callable[..., None], **arguments: object) -> None:
        thread = threading.Thread(target=target, args=(self,), kwargs=arguments, name="checkpoint", daemon=True)
        with DEFERRAL.held():  # it is known whether the thread has started
            thread.start()
            self.thread = thread

    def join(self) -> None:
        if self.thread is not None:
            self.thread.join()


class Saver:
    """Saves one run, on one rank. Every rank calls the same methods at the same updates.

    Args:
        published: Called on rank 0, in the background, with the manifest of each checkpoint once it exists.
        make_room: Called there when the disk is full; returns whether it deleted something.
        flush_history: Called there before a checkpoint exists, which relies on what the run has logged so far.

    Attributes:
        reports: Of saves that have ended, for `outcomes`; empty on other ranks than 0.
        settled, failures: Saves that this rank has finished, and those of them that failed: its share of the vote.
    """

    def __init__(
        self,
        storage: Storage,
        axis: Axis,
        device: torch.device,
        run_metadata: RunMetadata,
        published: Callable[[Manifest], None] = lambda manifest: None,
        make_room: Callable[[], bool] = lambda: False,
        flush_history: Callable[[], None] = lambda: None,
    ) -> None:
        self._storage = storage
        self._axis = axis
        self._device = device
        self.run_metadata = run_metadata
        self._published = published
        self._make_room = make_room
        self._flush_history = flush_history
        self._planner = SavePlanner(axis)
        self._save: _Save | None = None
        self._started = 0
        self.settled = 0
        self.failures = 0
        self._known_failures = 0.0
        self.reports: SimpleQueue[tuple[_Save, SaveReport]] = SimpleQueue()

    # --- on the main thread ---------------------------------------------------------------------------------------

    def start(
        self, state: TrainingState, metadata: StepMetadata, finished: Callable[[], None] = lambda: None
    ) -> Callable[[], None]:
        """Start a save of the present state, after the one in progress; return what to call before the state changes.

        `finished` is called once that save has ended, while the new one can't exist yet.
        """
        began = time.perf_counter()
        self.finish()
        finished()
        snapshot = self._planner.snapshot(state, self._device)
        save = _Save(metadata, snapshot, began)
        with DEFERRAL.held():
            save.run_in_background(self._write)
            self._save = save
            self._started += 1
        save.lost = time.perf_counter() - began

        def before_update() -> None:
            save.lost += snapshot.before_update()

        return before_update

    @property
    def in_progress(self) -> tuple[int, bool] | None:
        """The step of the last save, and whether all ranks have written it; None: it was waited for, or has failed."""
        save = self._save
        return None if save is None or save.failure is not None else (save.metadata.step, save.agreed)

    def resumes_from(self) -> int | None:
        """Return the step of the newest checkpoint, or of the save in progress; None: there is none."""
        return self.in_progress[0] if self.in_progress is not None else newest_step(self._storage)

    def on_vote(self, settled: float, failures: float) -> None:
        """Receive the sums of `settled` and `failures` over all ranks."""
        if self._axis.size == 1 or self._save is None or self._save.agreed:
            return  # a single rank ends its saves in the background
        if settled == self._started * self._axis.size:
            self._agree(self._save, failures)

    def finish(self) -> None:
        """Wait until the save in progress, if there is one, exists or has failed, on all ranks."""
        save = self._save
        if save is None:
            return
        waiting = time.perf_counter()
        save.join()
        if not save.agreed:
            self._axis.barrier()  # another rank's disk may be slower
            self._agree(save, float(sum(cast("list[int]", self._axis.gather(self.failures)))))
        save.join()
        self._axis.barrier()  # the first rank publishes it, and deletes older ones
        save.lost += time.perf_counter() - waiting
        self._save = None

    def amend(self, metadata: StepMetadata) -> str | None:
        """Replace metrics of a step's checkpoint, and add to its state and environment; return why that failed.

        All ranks together. The checkpoint always has its old manifest or the new one.
        """
        self.finish()
        failure: str | None = None
        if self._axis.rank == 0:
            try:
                self._flush_history()
                self._published(self._amended(metadata))
            except Exception as error:
                failure = failure_reason(error)
        return cast("str | None", self._axis.broadcast(failure))

    def disable_deletion(self) -> None:
        """Delete nothing for later saves."""
        self._published = lambda manifest: None
        self._make_room = lambda: False

    def abandon(self) -> None:
        """Drop the save in progress without the other ranks, and free the memory for saves."""
        save, self._save = self._save, None
        if save is not None:
            save.join()
        self._planner.free()

    def join(self) -> None:
        """Wait for what this rank does of the save in progress."""
        if self._save is not None:
            self._save.join()

    def outcomes(self) -> list[SaveReport]:
        """Return the reports of the saves that ended since the last call; empty on other ranks than 0."""
        reports = []
        while not self.reports.empty():
            save, report = self.reports.get()
            reports.append(replace(report, lost=save.lost))  # training may have waited for its end
        return reports

    def _agree(self, save: _Save, failures: float) -> None:
        save.agreed = True
        failed, self._known_failures = failures > self._known_failures, failures
        if failed:
            faults = enumerate(cast("list[str | None]", self._axis.gather(save.failure)))
            save.failure = next(f"rank {rank}: {fault}" for rank, fault in faults if fault is not None)
        if self._axis.rank == 0:
            save.run_in_background(self._settle, failed=failed)

    # --- in the background ----------------------------------------------------------------------------------------

    def _write(self, save: _Save) -> None:
        try:
            save.snapshot.complete()
            owner = self._storage.owner()
            if owner is not None and owner.run != self.run_metadata.run:  # it began where this run's folder was
                raise RunFailed(f"{self._storage.place} belongs to another run now: {owner}")
            save.draft = self._storage.begin(checkpoint_name(save.metadata.step))
            save.record = write_rank_file(save.draft, save.snapshot, self.run_metadata.run, save.metadata.step)
            if self._axis.rank != 0:
                write_record(save.draft, self._axis.rank, save.record)
        except Exception as error:
            save.failure = failure_reason(error)
            self.failures += 1
        self.settled += 1
        if self._axis.size == 1:
            save.agreed = True
            self._settle(save, failed=save.failure is not None)

    def _settle(self, save: _Save, *, failed: bool) -> None:
        published: Manifest | None = None
        made_room, newest = False, None
        if not failed:
            try:
                self._flush_history()
                published = self._publish(save)
            except Exception as error:
                save.failure = failure_reason(error)
        if published is None:
            if save.draft is not None:
                save.draft.discard()
            else:  # other ranks may have begun a draft where this rank could not
                self._storage.remove_stale_drafts()
            made_room, newest = _is_disk_full(save.failure) and self._make_room(), newest_step(self._storage)
        size, seconds = published.size if published else 0, time.perf_counter() - save.began
        report = SaveReport(save.metadata.step, size, seconds, save.lost, save.failure, made_room, newest)
        self.reports.put((save, report))
        if published is not None:
            self._published(published)

    def _amended(self, metadata: StepMetadata) -> Manifest:
        name = checkpoint_name(metadata.step)
        old = manifest_bytes(self._storage, name)
        new = amended(old, metadata.state, metadata.metrics, metadata.environment)
        manifest = checked_manifest(self._storage, name, new)
        self._storage.replace_manifest(name, new)
        return manifest

    def _publish(self, save: _Save) -> Manifest:
        draft, metadata = save.draft, save.metadata
        assert draft is not None, "a rank that has settled without failing has a draft"
        assert save.record is not None, "and the record of its file"
        ranks = self._axis.size
        records = {0: save.record, **{rank: taken_record(draft, rank) for rank in range(1, ranks)}}
        made = manifest_of(self.run_metadata, metadata, records, self._planner.plan, ranks)
        draft.publish(encoded(made))
        return made


def failure_reason(error: Exception) -> str:
    """Return why a state could not be saved."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}"
    return str(error) if isinstance(error, RunFailed) else f"{type(error).__name__}: {error}"


def _is_disk_full(failure: str | None) -> bool:
    return failure is not None and any(os.strerror(number) in failure for number in (errno.ENOSPC, errno.EDQUOT))


# --- files and records --------------------------------------------------------------------------------------------


def write_rank_file(draft: Draft, snapshot: Snapshot, run: str, step: int) -> FileEntry:
    """Write a rank's file with the hashes of all its blocks in the header; return its record. Raises OSError."""
    layout, image = snapshot.layout, snapshot.image
    hasher = BlockHasher(run, step, layout.file)
    hashes = "".join(
        hasher.hash_block(item.name, at - start, *image.pieces(at, min(at + hashing.BLOCK_BYTES, end)))
        for item, start, end in layout.spans()
        for at in range(start, end, hashing.BLOCK_BYTES)
    )
    image.write(layout.hashes_at, hashes.encode())
    header = len(layout.header)
    record = FileEntry(size=layout.size, header=header, header_hash=hasher.hash_block("", 0, *image.pieces(0, header)))
    draft.write(layout.file, *image.pieces())
    return record


def write_record(draft: Draft, rank: int, record: FileEntry) -> None:
    """Write a rank's record, after its file. Raises OSError."""
    text = record.model_dump_json().encode()
    draft.write(_record_file(rank), memoryview(hashing.hash_bytes(text).encode() + b"\n" + text))


def taken_record(draft: Draft, rank: int) -> FileEntry:
    """Return a rank's record, and remove it. Raises OSError, or RunFailed if the storage has changed it."""
    record = read_record(draft, rank)
    draft.remove(_record_file(rank))
    return record


def read_record(draft: Draft, rank: int) -> FileEntry:
    """Return a rank's record. Raises OSError, or RunFailed if it isn't what the rank has written."""
    file = _record_file(rank)
    checksum, _, text = draft.read(file).partition(b"\n")
    if hashing.hash_bytes(text).encode() != checksum:
        raise RunFailed(f"{file} is not what its rank has written: the storage corrupts data")
    return FileEntry.model_validate_json(text)


def manifest_of(
    run_metadata: RunMetadata, metadata: StepMetadata, records: Mapping[int, FileEntry], plan: WritePlan, ranks: int
) -> Manifest:
    """Return the manifest of what ranks have written; `records` are by rank, `ranks` is the number of all ranks."""
    index_of, grids = plan.grids()
    return Manifest(
        format_version=2,
        run=run_metadata.run,
        step=metadata.step,
        samples=metadata.samples,
        tokens=metadata.tokens,
        ranks=ranks,
        written=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        files={shard_file(rank): record for rank, record in records.items()},
        grids=tuple(GridEntry.model_construct(cuts=grid.cuts, ranks=grid.ranks) for grid in grids),
        tensors={
            name: TensorEntry.model_construct(dtype=info.dtype, shape=info.shape, grid=index_of[name])
            for name, info in plan.infos.items()
        },
        state=dict(metadata.state),
        metrics=dict(metadata.metrics),
        config=dict(run_metadata.config),
        environment={**run_metadata.environment, **metadata.environment},
    )


def encoded(made: Manifest) -> bytes:
    """Return a manifest as it is stored. Raises RunFailed, or CorruptCheckpoint, if it could not be read again."""
    data = manifests.to_bytes(made)
    if len(data) > manifests.MAX_BYTES:
        raise RunFailed(f"its manifest has {len(data):,} bytes, and the limit is {manifests.MAX_BYTES:,}")
    manifests.from_bytes(data)
    return data


def _record_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"
