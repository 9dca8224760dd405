"""Checkpoints without a run: states of some ranks, saved in this process as their ranks would have done it together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from queue import Queue
from typing import Any

import torch
from torch import Tensor

from lockstep.checkpoint.local import LocalStorage
from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.reading import read_manifest
from lockstep.checkpoint.saving import RunMetadata, Saver, StepMetadata
from lockstep.checkpoint.storage import Storage, names_by_step
from lockstep.core.records import TrainingState


class Divided:
    """Cut along one dim, as a DTensor's local part is: what `held` and `part` ask of it."""

    def __init__(self, whole: Tensor, ranks: int, rank: int, dim: int) -> None:
        chunks = list(whole.chunk(ranks, dim))
        self.shape, self.dtype = whole.shape, whole.dtype
        self._local = chunks[rank] if rank < len(chunks) else whole.narrow(dim, 0, 0)
        before = sum(chunk.shape[dim] for chunk in chunks[:rank])
        self._offsets = [before if index == dim else 0 for index in range(whole.dim())]

    def __create_chunk_list__(self) -> list[Any]:
        return [_Chunk(self._offsets, list(self._local.shape))]

    def to_local(self) -> Tensor:
        return self._local


class _Chunk:
    def __init__(self, offsets: list[int], sizes: list[int]) -> None:
        self.offsets, self.sizes = offsets, sizes


def state_of(tensors: Mapping[str, Any]) -> TrainingState:
    return TrainingState(dict(tensors), {})


def rank_states(tensors: Mapping[str, Tensor], ranks: int, dim: int) -> list[TrainingState]:
    """Each rank's part of all of them."""
    return [
        state_of({name: Divided(tensor, ranks, rank, dim) for name, tensor in tensors.items()}) for rank in range(ranks)
    ]


def saved(folder: Path, states: Sequence[TrainingState], step: int = 7) -> tuple[Storage, str, Manifest]:
    """One checkpoint of these ranks' states: its storage, name and manifest."""
    storage = LocalStorage(folder)
    failures = save(storage, states, step)
    assert failures == [], failures
    name = names_by_step(storage.names())[step]
    return storage, name, read_manifest(storage, name)


def save(storage: Storage, states: Sequence[TrainingState], step: int, run: str = "run") -> list[str]:
    """Why it failed, if it did."""
    meeting = Meeting(len(states))
    outcomes: list[Any] = []

    def rank(number: int) -> None:
        saver = Saver(storage, meeting.axis(number), torch.device("cpu"), RunMetadata(run, {}, {}))
        saver.start(states[number], StepMetadata(step, 10 * step, 100 * step, {"sharding": {}}))
        saver.finish()
        outcomes.extend(saver.outcomes())

    together(len(states), rank)
    return [outcome.failure for outcome in outcomes if outcome.failure is not None]


def together(ranks: int, act: Callable[[int], None]) -> None:
    """Each rank in a thread of its own."""
    errors: list[BaseException] = []

    def guarded(rank: int) -> None:
        try:
            act(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(rank,), daemon=True) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]


class Meeting:
    """Threads that agree as the ranks of an axis do."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks, timeout=60)
        self._values: list[Any] = [None] * ranks
        self._mail: dict[tuple[int, int], Queue[Tensor]] = {}

    def axis(self, rank: int) -> Any:
        return _Member(self, rank, len(self._values))

    def mail(self, sender: int, receiver: int) -> Queue[Tensor]:
        """What one rank has sent to another."""
        return self._mail.setdefault((sender, receiver), Queue())

    def gather(self, rank: int, value: object) -> list[Any]:
        self._values[rank] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()
        return found


class _Member:
    def __init__(self, meeting: Meeting, rank: int, size: int) -> None:
        self._meeting, self.rank, self.size = meeting, rank, size

    def gather(self, value: object) -> list[Any]:
        return self._meeting.gather(self.rank, value)

    def broadcast(self, value: object) -> Any:
        return self.gather(value)[0]

    def barrier(self) -> None:
        self.gather(None)

    def swap(self, to: int, sent: Tensor | None, source: int, received: Tensor | None) -> None:
        if sent is not None:
            self._meeting.mail(self.rank, to).put(sent.clone())
        if received is not None:
            received.copy_(self._meeting.mail(source, self.rank).get(timeout=60))
