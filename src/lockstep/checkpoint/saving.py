"""A save, from the moment that is copied to the manifest that makes it exist.

    main thread    start: share out, copy what changes |  train on ...                | hear: all ranks have settled?
    background         copy the rest, hash, write, flush, say so in the next vote      |   first rank: publish

Ranks agree through the vote that every update has anyway: each says how many of its saves are settled (on the disk, or
failed), and all hear the sum. No collective runs outside the main thread. One save is under way at a time: a next one
waits for it. A save that fails costs a warning, and nothing of what was saved before it.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, cast

from lockstep.checkpoint import fingerprints, manifest
from lockstep.checkpoint.boxes import Piece, share_out
from lockstep.checkpoint.fingerprints import Binding
from lockstep.checkpoint.manifest import ELEMENT_BYTES, FileEntry, Manifest, Part, TensorEntry
from lockstep.checkpoint.shards import Layout, file_of, lay_out
from lockstep.checkpoint.snapshot import Snapshot, snapshot_on
from lockstep.checkpoint.storage import checkpoint_name, names_by_step
from lockstep.core.errors import RunFailed
from lockstep.core.records import SaveReport
from lockstep.distributed.shard_boxes import LocalShards, local_shards

if TYPE_CHECKING:
    import torch

    from lockstep.checkpoint.storage import Draft, Storage
    from lockstep.core.protocols import Axis
    from lockstep.core.records import TrainingState


@dataclass(frozen=True, slots=True)
class RunMetadata:
    """What is the same in all checkpoints of an attempt.

    Attributes:
        run: made up when the run first began.
        config, environment: as in the manifest.
    """

    run: str
    config: Mapping[str, Any]
    environment: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class StepMetadata:
    """Of a run, when it is saved; attributes as in the manifest."""

    step: int
    samples: int
    tokens: int
    state: Mapping[str, Any]
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)


class Saver:
    """Saves one run, on one rank. Every rank calls the same methods at the same updates.

    Attributes:
        run_metadata: as given.

    Args:
        published: called on the first rank, in the background, with the manifest of each save that came to exist.
        make_room: called there when a save has failed because the disk is full; returns whether it deleted something.
        flush_history: called there before a checkpoint comes to exist: it counts on what the run has written so far.
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
        self._shares = _Shares(axis)
        self._snapshot: Snapshot | None = None
        self._save: _Save | None = None
        self._begun = 0
        self._settled = 0
        self._failures = 0
        self._failures_heard = 0.0
        self._outcomes: SimpleQueue[SaveReport] = SimpleQueue()

    # --- what the run calls ---------------------------------------------------------------------------------------

    def start(self, state: TrainingState, moment: StepMetadata) -> Callable[[], None]:
        """Begins a save of the state as it is now; returns what is to be called before it changes.

        Waits for a save that is still under way.
        """
        began = time.perf_counter()
        self.finish()
        layout = self._shares.of(state)
        if self._snapshot is None or self._snapshot.layout != layout:
            self._snapshot = None  # its memory is free before more is asked for
            self._snapshot = snapshot_on(self._device, layout)
        snapshot = self._snapshot
        snapshot.begin(state.tensors, state.changes_in_forward)
        self._begun += 1
        save = self._save = _Save(moment, snapshot, began)
        save.thread = threading.Thread(target=self._write, args=(save,), name="checkpoint", daemon=True)
        save.thread.start()
        save.lost = time.perf_counter() - began

        def before_update() -> None:
            waiting = time.perf_counter()
            snapshot.before_update()
            save.lost += time.perf_counter() - waiting

        return before_update

    @property
    def status(self) -> tuple[int, int]:
        """For the vote: saves that this rank has settled, and how many of them failed."""
        return self._settled, self._failures

    def on_vote(self, settled: float, failures: float) -> None:
        """The sums over all ranks of what they said in a vote."""
        if self._axis.size == 1 or self._save is None or self._save.heard:
            return  # a rank that is alone has nobody to hear of: the background ends its saves
        if settled != self._begun * self._axis.size:
            return
        failed, self._failures_heard = failures > self._failures_heard, failures
        self._end(self._save, failed=failed)

    def finish(self) -> None:
        """Waits until the save under way, if there is one, exists or has failed, on all ranks."""
        save = self._save
        if save is None:
            return
        waiting = time.perf_counter()
        _join(save.thread)
        if not save.heard:
            sums = self._axis.gather(self._failures)
            total = float(sum(cast("list[int]", sums)))
            failed, self._failures_heard = total > self._failures_heard, total
            self._end(save, failed=failed)
        _join(save.thread)
        save.lost += time.perf_counter() - waiting
        self._save = None

    def disable_deletion(self) -> None:
        """From now on nothing is deleted for what is saved."""
        self._published = lambda manifest: None
        self._make_room = lambda: False

    def abandon(self) -> None:
        """Without the other ranks: no save comes to exist any more, and the memory for it is free."""
        save, self._save = self._save, None
        if save is not None:
            _join(save.thread)
        self._snapshot = None

    def outcomes(self) -> list[SaveReport]:
        """Of the saves that ended since the last call, on the first rank."""
        found = []
        while not self._outcomes.empty():
            found.append(self._outcomes.get())
        return found

    # --- behind them ----------------------------------------------------------------------------------------------

    def _write(self, save: _Save) -> None:
        """In the background: this rank's file. Then this rank has settled."""
        try:
            save.snapshot.complete()
            self._refuse_foreign_storage()
            save.draft = self._storage.begin(checkpoint_name(save.moment.step))
            self._write_file(save, save.draft)
        except Exception as error:
            save.failure = failure_reason(error)
            self._failures += 1
        self._settled += 1
        if self._axis.size == 1:  # nobody to agree with
            save.heard = True
            self._settle(save, failed=save.failure is not None)

    def _refuse_foreign_storage(self) -> None:
        """Another run may have begun where this one's folder was."""
        owner = self._storage.owner()
        if owner is not None and owner.run != self.run_metadata.run:
            raise RunFailed(f"{self._storage.place} belongs to another run now: {owner}")

    def _write_file(self, save: _Save, draft: Draft) -> None:
        layout, image = save.snapshot.layout, save.snapshot.image
        binding = Binding(self.run_metadata.run, save.moment.step, layout.file)
        save.record = {
            "file": FileEntry(
                size=layout.size,
                header=len(layout.header),
                header_hash=binding.block("", 0, image[: len(layout.header)]),
            ).model_dump(mode="json"),
            "parts": [
                [
                    place.piece.name,
                    _part(
                        place.piece,
                        place.at,
                        binding.blocks(place.piece.name, image[place.at : place.end]),
                        layout.file,
                    ),
                ]
                for place in layout.places
            ],
        }
        draft.write(layout.file, image)
        if self._axis.rank != 0:
            draft.write(_record_of(self._axis.rank), memoryview(_sealed(save.record)))

    def _end(self, save: _Save, *, failed: bool) -> None:
        """All ranks have settled, and know it."""
        save.heard = True
        if failed:
            save.failure = self._first_reason(save)
        if self._axis.rank == 0:
            save.thread = threading.Thread(
                target=self._settle, args=(save,), kwargs={"failed": failed}, name="checkpoint", daemon=True
            )
            save.thread.start()

    def _first_reason(self, save: _Save) -> str:
        """Of the ranks that could not write their parts; on all ranks."""
        reasons = cast("list[str | None]", self._axis.gather(save.failure))
        rank, reason = next((rank, reason) for rank, reason in enumerate(reasons) if reason is not None)
        return f"rank {rank}: {reason}" if self._axis.size > 1 else reason

    def _settle(self, save: _Save, *, failed: bool) -> None:
        """On the first rank, in the background: makes the checkpoint exist, or removes what there is of it."""
        written: Manifest | None = None
        if not failed:
            try:
                self._flush_history()
                written = self._publish(save)
            except Exception as error:
                save.failure = failure_reason(error)
        if written is None and save.draft is not None:
            save.draft.discard()
        elif written is None:  # others may have begun where this rank could not
            self._storage.remove_stale_drafts()
        seconds = time.perf_counter() - save.began
        size = written.size if written else 0
        made_room = written is None and _is_full(save.failure) and self._make_room()
        newest = self._newest() if written is None else None
        self._outcomes.put(SaveReport(save.moment.step, size, seconds, save.lost, save.failure, made_room, newest))
        if written is not None:
            self._published(written)

    def _newest(self) -> int | None:
        try:
            return max(names_by_step(self._storage.names()), default=None)
        except OSError:
            return None

    def _publish(self, save: _Save) -> Manifest:
        draft, moment = save.draft, save.moment
        assert draft is not None, "a rank that has settled without failing has a draft"
        records = [save.record]
        for rank in range(1, self._axis.size):
            records.append(_opened(draft.read(_record_of(rank)), _record_of(rank)))
            draft.remove(_record_of(rank))
        made = Manifest(
            format_version=1,
            run=self.run_metadata.run,
            step=moment.step,
            samples=moment.samples,
            tokens=moment.tokens,
            ranks=self._axis.size,
            written=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            files={file_of(rank): FileEntry(**record["file"]) for rank, record in enumerate(records)},
            tensors=_tensors(records),
            state=dict(moment.state),
            metrics=dict(moment.metrics),
            config=dict(self.run_metadata.config),
            environment={**self.run_metadata.environment, **moment.environment},
        )
        data = manifest.to_bytes(made)
        manifest.from_bytes(data)  # what can't be read again must not pass for a checkpoint
        draft.publish(data)
        return made


@dataclass(slots=True)
class _Save:
    """One that is under way."""

    moment: StepMetadata
    snapshot: Snapshot
    began: float
    lost: float = 0.0
    draft: Draft | None = None
    record: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None
    heard: bool = False
    thread: threading.Thread | None = None


class _Shares:
    """Who writes what: agreed upon once, and again when a tensor has come or gone."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._held: dict[str, LocalShards] | None = None
        self._layout: Layout | None = None

    def of(self, state: TrainingState) -> Layout:
        """What this rank writes."""
        mine = {name: local_shards(tensor) for name, tensor in state.tensors.items()}
        unchanged = self._layout is not None and mine == self._held
        if all(self._axis.gather(unchanged)):
            assert self._layout is not None
            return self._layout
        holdings = cast("list[dict[str, LocalShards]]", self._axis.gather(mine))
        pieces = share_out(holdings, ELEMENT_BYTES)[self._axis.rank]
        self._held, self._layout = mine, lay_out(file_of(self._axis.rank), pieces)
        return self._layout


def _part(piece: Piece, at: int, blocks: list[str], file: str) -> dict[str, Any]:
    return {
        "dtype": piece.kind.dtype,
        "shape": list(piece.kind.shape),
        "file": file,
        "at": at,
        "offsets": list(piece.box.offsets),
        "sizes": list(piece.box.sizes),
        "blocks": blocks,
    }


def _tensors(records: list[dict[str, Any]]) -> dict[str, TensorEntry]:
    """Of all ranks' records, by name."""
    parts: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        for name, part in record["parts"]:
            parts.setdefault(name, []).append(part)
    return {
        name: TensorEntry(
            dtype=found[0]["dtype"],
            shape=tuple(found[0]["shape"]),
            parts=tuple(
                Part(
                    file=part["file"],
                    at=part["at"],
                    offsets=tuple(part["offsets"]),
                    sizes=tuple(part["sizes"]),
                    blocks=tuple(part["blocks"]),
                )
                for part in found
            ),
        )
        for name, found in parts.items()
    }


def _record_of(rank: int) -> str:
    return f"rank-{rank:05d}.json"


def _sealed(record: dict[str, Any]) -> bytes:
    text = json.dumps(record).encode()
    return fingerprints.of_bytes(text).encode() + b"\n" + text


def _opened(data: bytes, file: str) -> dict[str, Any]:
    seal, _, text = data.partition(b"\n")
    if fingerprints.of_bytes(text).encode() != seal:
        raise RunFailed(f"{file} is not what its rank has written: the storage corrupts data")
    return cast("dict[str, Any]", json.loads(text))


def failure_reason(error: Exception) -> str:
    """Why something could not be saved."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.strerror}{f': {error.filename}' if error.filename else ''}"
    return str(error) if isinstance(error, RunFailed) else f"{type(error).__name__}: {error}"


def _is_full(reason: str | None) -> bool:
    """Whether a save failed for want of room, on whichever rank."""
    return reason is not None and any(os.strerror(number) in reason for number in (errno.ENOSPC, errno.EDQUOT))


def _join(thread: threading.Thread | None) -> None:
    if thread is not None:
        thread.join()
