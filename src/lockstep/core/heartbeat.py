"""The heartbeats of a host's ranks: shared memory that the ranks write and their launcher reads.

    rank            clock.enter(FORWARD) --> a few stores: time, phase            no system call, no lock, no copy
    data worker     the sample that it reads                                      in the same memory
    launcher        reads when it likes                                           `launch.hang_watch`

    a row           numbers (float64) | data workers (int64) | samples of the last updates (int64)
                    | name of the evaluation set | samples of the request that is read (int64)

A process that no launcher watches writes into memory of its own.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from enum import IntEnum
from mmap import mmap
from pathlib import Path
from typing import Any, NamedTuple

from lockstep.core.formatting import listed

TIME, PHASE, UPDATES, SECONDS, MICRO, CALLS, OPERATION, STAGE, STEPS, READY, FETCHING, SAMPLE = range(12)
PROCESS, FETCHED, RECORDS, WORKERS = range(12, 16)
"""The numbers of a row: time of the last mark (CLOCK_MONOTONIC) and its phase, `IN_WHOLE` added in a collective of a
save or an evaluation; updates ended; seconds of the last one; micro-batch, from 0; collectives called, and which one
runs (a number of `OPERATIONS`, 0: none); `Stage`; updates of the run before this process; whether the rank writes its
stacks on request; the micro-batch that is fetched; the mark of the sample that is read, see `mark_of`; of a rank that
another launcher has started, its process; the update whose samples are fetched now, from 0, + 1; how often the rank
has written its flight record, + 1, or 0 if it doesn't; how many data workers fetch for it, 0: it does so itself."""
IN_WHOLE = 100
_NUMBERS = 16
_MOST_WORKERS, _WORKER = 32, 3  # a worker: process, mark of the first sample of its request, and of that it reads
_UPDATES = 4  # whose samples are noted: on an accelerator, two are fetched ahead
_MOST_SAMPLES, _HEAD = 512, 4  # an update: its number, samples of its first micro-batch, samples noted, samples in all
_WORKERS_AT = _NUMBERS
_SAMPLES_AT = _WORKERS_AT + _MOST_WORKERS * _WORKER
_NAME_AT, _NAME = _SAMPLES_AT + _UPDATES * (_HEAD + _MOST_SAMPLES), 16  # of the evaluation set
_REQUEST_AT, _MOST_OF_REQUEST = _NAME_AT + _NAME, 2**16  # how many are noted, negative: of that set; and the samples
_ROW = _REQUEST_AT + 1 + _MOST_OF_REQUEST
_BYTES = 8
_MOST_NAMED = 8  # samples


def mark_of(sample: int, evaluates: bool) -> int:
    """Return the number for a sample that is read, of the training data or an evaluation set; 0: none is."""
    return -sample - 1 if evaluates else sample + 1


class Stage(IntEnum):
    """The stages of a rank's run."""

    UNKNOWN = 0  # a program that trains with a loop of its own, or does something else
    START = 1
    TRAINING = 2
    END = 3
    SNAPSHOT = 4  # in the host's memory
    FIRST_SNAPSHOT = 5  # which allocates memory, in a time that grows with the state


@dataclass(frozen=True, slots=True)
class Worker:
    """A data worker that fetches.

    Attributes:
        first: The first sample of its request.
        sample: The one that it reads; None: it isn't known.
        evaluation_set: The evaluation set that they are of; None: the training data.
    """

    number: int
    process: int
    first: int
    sample: int | None
    evaluation_set: str | None = None


@dataclass(frozen=True, slots=True)
class Reading:
    """The samples that a rank, or a data worker of it, is reading.

    Attributes:
        samples: The sample; several: one of them.
        evaluation_set: The evaluation set that they are of; None: the training data.
    """

    samples: tuple[int, ...]
    evaluation_set: str | None = None

    def __str__(self) -> str:
        names = listed([*map(str, self.samples)], _MOST_NAMED)
        head = "sample" if len(self.samples) == 1 else "one of samples"
        return f"{head} {names}{of_set(self.evaluation_set)}"


def of_set(evaluation_set: str | None) -> str:
    """Return the end of a sample's name that states its evaluation set; empty for the training data."""
    if evaluation_set is None:
        return ""
    return f" of data.evaluation.{evaluation_set}" if evaluation_set else " of an evaluation set"


class Files(NamedTuple):
    """The descriptors of a rank's files.

    Attributes:
        stacks: The file for its stacks.
        record: The file for its flight record.
        bell: Numbers of 8 bytes that are written into it are read by the rank: a request for its flight record.
        memory: The file that is the shared memory.
    """

    stacks: int = -1
    record: int = -1
    bell: int = -1
    memory: int = -1


class Heartbeat:
    """The heartbeat of a rank: its row of the shared memory, and its files.

    Attributes:
        numbers: See `TIME` and the others.
    """

    def __init__(self, memory: Any, place: int, files: Files) -> None:
        self._place, self.files = place, files
        row = memoryview(memory).cast("B")[place * _ROW * _BYTES : (place + 1) * _ROW * _BYTES]
        self.numbers = row.cast("d")
        self._integers = row.cast("l")
        self._is_worker, self._sample_at = False, SAMPLE

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing.reduction import DupFd

        return _received, (self._place, *map(DupFd, self.files))

    def close(self) -> None:
        for file in self.files:
            os.close(file)

    # --- what a rank writes ---

    def begin_fetch(self, step: int, requests: Sequence[Any]) -> None:
        """Note the samples (arrays of int64, one a micro-batch) of an update, before they are fetched."""
        integers, at = self._integers, _SAMPLES_AT + step % _UPDATES * (_HEAD + _MOST_SAMPLES)
        first, end, total = at + _HEAD, at + _HEAD, 0
        limit = first + _MOST_SAMPLES
        for indices in requests:
            number = len(indices)
            total += number
            if end + number <= limit and total == end - first + number:
                integers[end : end + number] = memoryview(indices)
                end += number
        integers[at], integers[at + 1], integers[at + 2], integers[at + 3] = step, len(requests[0]), end - first, total
        self.numbers[FETCHED] = step + 1

    def fetch(self, micro: int, indices: Any) -> None:
        """Note the micro-batch of that update, from 0, and its samples (an array of int64), before it is fetched."""
        self._note_request(indices, 1)
        self.numbers[FETCHING] = micro

    def end_fetch(self) -> None:
        """Note that the samples of the update are here."""
        self.numbers[FETCHED] = 0

    def begin_evaluation(self, name: str) -> None:
        """Note the evaluation set whose samples are read from now on."""
        padded = name.encode()[: _NAME * _BYTES].ljust(_NAME * _BYTES, b"\0")
        self._integers[_NAME_AT : _NAME_AT + _NAME] = memoryview(padded).cast("l")

    def evaluated(self, indices: Any) -> None:
        """Note the samples (an array of int64) of an evaluation set that this process reads next; none: it has them."""
        if not self._is_worker:
            self._note_request(indices, -1)

    def _note_request(self, indices: Any, sign: int) -> None:
        number, first = min(len(indices), _MOST_OF_REQUEST), _REQUEST_AT + 1
        self._integers[first : first + number] = memoryview(indices[:number])
        self._integers[_REQUEST_AT] = sign * number

    def become_worker(self, number: int) -> None:
        """Write as a data worker from now on, in its process."""
        if number < _MOST_WORKERS:
            at = _WORKERS_AT + number * _WORKER
            self._is_worker, self._sample_at = True, at + 2

    def worker_fetches(self, mark: int) -> None:
        """Note the first sample of the request that this data worker answers; 0: none."""
        if self._is_worker:
            at = self._sample_at - 2
            self._integers[at], self._integers[at + 1], self._integers[at + 2] = os.getpid(), mark, 0

    def sample_slot(self) -> tuple[memoryview[Any], int]:
        """Return where to write the mark of the sample that is read; 0 afterwards."""
        return self._integers if self._is_worker else self.numbers, self._sample_at

    # --- what the launcher reads ---

    def evaluation_set(self) -> str:
        """Return the name of the evaluation set whose samples are, or were, read last; empty: it isn't known."""
        name = self._integers[_NAME_AT : _NAME_AT + _NAME].tobytes()
        return name.rstrip(b"\0").decode("utf-8", "ignore")

    def is_in(self, phase: int) -> bool:
        """Return whether the rank is in a phase, or in a collective of it."""
        return int(self.numbers[PHASE]) in (phase, phase + IN_WHOLE)

    def _set_of(self, mark: int) -> str | None:
        return self.evaluation_set() if mark < 0 else None

    def samples(self, step: int, micro: int) -> tuple[list[int], int]:
        """Return the samples of a micro-batch of an update (as far as they are noted), and how many there are."""
        integers, at = self._integers, _SAMPLES_AT + step % _UPDATES * (_HEAD + _MOST_SAMPLES)
        noted_step, width, noted, total = integers[at : at + _HEAD].tolist()
        if noted_step != step or not width:
            return [], 0
        first = micro * width
        samples = integers[at + _HEAD + first : at + _HEAD + min(noted, first + width)].tolist()
        if not samples and (self.numbers[FETCHED], self.numbers[FETCHING]) == (step + 1, micro):
            samples = self._request(1)
        return samples, min(width, total - first)

    def _request(self, sign: int) -> list[int]:
        """Return the samples of the request that is noted; none if it is of the other sign."""
        number = max(0, sign * self._integers[_REQUEST_AT])
        samples: list[int] = self._integers[_REQUEST_AT + 1 : _REQUEST_AT + 1 + number].tolist()
        return samples

    def workers(self) -> list[Worker]:
        """Return the data workers that fetch."""
        busy = []
        for number in range(_MOST_WORKERS):
            at = _WORKERS_AT + number * _WORKER
            process, first, sample = self._integers[at : at + _WORKER].tolist()
            if process and first:
                read = abs(sample) - 1 if sample else None
                busy.append(Worker(number, process, abs(first) - 1, read, self._set_of(first)))
        return busy

    def awaited(self) -> tuple[list[int], Worker | None]:
        """Return the samples of the training data that this rank waits for, and the data worker that it waits for.

        That may already read the next request: a batch is sent by a thread of the worker, which needs its interpreter.
        """
        if not (update := int(self.numbers[FETCHED])):
            return [], None
        samples, _ = self.samples(update - 1, int(self.numbers[FETCHING]))
        workers = [worker for worker in self.workers() if worker.evaluation_set is None]
        fetching = [worker for worker in workers if samples and worker.first == samples[0]]
        return samples, next(iter(fetching or workers), None)

    def reading(self) -> Reading | None:
        """Return what this rank's own process reads; None: nothing, as far as it is known."""
        if mark := int(self.numbers[SAMPLE]):
            return Reading((abs(mark) - 1,), self._set_of(mark))
        if evaluated := self._request(-1):
            return Reading((*evaluated,), self.evaluation_set())
        samples, _ = self.awaited()
        return Reading((*samples,)) if samples and not self.numbers[WORKERS] else None

    def waits_for(self) -> Reading | None:
        """Return what this rank reads, or waits for while a data worker reads it."""
        samples, worker = self.awaited()
        if self.numbers[SAMPLE] or worker is None:
            evaluating = (each for each in self.workers() if each.evaluation_set is not None)
            return self.reading() or next(map(_read_by, evaluating), None)
        request = Reading((*samples,)) if samples and worker.first == samples[0] else None
        return _read_by(worker) or request


def _read_by(worker: Worker) -> Reading | None:
    return None if worker.sample is None else Reading((worker.sample,), worker.evaluation_set)


def _received(place: int, *received: Any) -> Heartbeat:
    files = Files(*(file.detach() for file in received))
    return Heartbeat(mmap(files.memory, 0), place, files)


def heartbeats(ranks: int) -> list[Heartbeat]:
    """Make the heartbeats of a host's ranks, which their processes inherit or receive."""
    with ExitStack() as opened:

        def kept(handle: int) -> int:
            opened.callback(os.close, handle)
            return handle

        memory = kept(_file())
        shared = _mapped(memory, ranks)
        files = [
            Files(kept(_file()), kept(_file()), kept(os.eventfd(0)), kept(os.dup(memory)) if place else memory)
            for place in range(ranks)
        ]
        opened.pop_all()
    return [Heartbeat(shared, place, files[place]) for place in range(ranks)]


def mapped_heartbeats(folder: Path, ranks: int) -> list[Heartbeat]:
    """Return the heartbeats of a host's ranks in the files of a folder, for processes that inherit nothing."""
    handle = os.open(folder / "heartbeats", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        memory = _mapped(handle, ranks)
        return [Heartbeat(memory, place, _named_files(folder, place, os.dup(handle))) for place in range(ranks)]
    finally:
        os.close(handle)


def _mapped(handle: int, ranks: int) -> mmap:
    size = ranks * _ROW * _BYTES
    os.ftruncate(handle, size)
    return mmap(handle, size)


def _named_files(folder: Path, place: int, memory: int) -> Files:
    bell, flags = folder / f"bell-{place}", os.O_RDWR | os.O_NOFOLLOW
    with suppress(FileExistsError):
        os.mkfifo(bell, 0o600)
    stacks = os.open(folder / f"stacks-{place}", flags | os.O_CREAT | os.O_APPEND, 0o600)
    record = os.open(folder / f"record-{place}", flags | os.O_CREAT, 0o600)
    return Files(stacks, record, os.open(bell, flags), memory)


def _file() -> int:
    """Open a file without a name, which needs no file system where the kernel has such files."""
    with suppress(AttributeError, OSError):
        return os.memfd_create("lockstep")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def begin_stage(stage: Stage, steps: int = 0) -> None:
    """Note that this rank begins a stage of its run, which has made some updates."""
    numbers = own().numbers
    numbers[STAGE], numbers[TIME] = stage, time.perf_counter()
    if stage is Stage.TRAINING:
        numbers[STEPS] = steps - numbers[UPDATES]


@contextmanager
def snapshot_stage(*, first: bool) -> Iterator[None]:
    """Note that the block takes a snapshot in memory."""
    numbers = own().numbers
    before = numbers[STAGE]
    numbers[STAGE] = Stage.FIRST_SNAPSHOT if first else Stage.SNAPSHOT
    try:
        yield
    finally:
        numbers[STAGE] = before


_own = [Heartbeat(bytearray(_ROW * _BYTES), 0, Files())]


def own() -> Heartbeat:
    """Return the heartbeat of this process."""
    return _own[0]


@contextmanager
def reads(mark: int) -> Iterator[None]:
    """Note a sample while the block reads it; if that ends the process, the note stays for its launcher."""
    slots, at = own().sample_slot()
    slots[at] = mark
    try:
        yield
    except Exception:
        slots[at] = 0
        raise
    slots[at] = 0


@contextmanager
def evaluates(indices: Any) -> Iterator[None]:
    """Note a batch (an array of int64) of an evaluation set while the block reads it, as `reads` notes a sample."""
    beat = own()
    beat.evaluated(indices)
    try:
        yield
    except Exception:
        beat.evaluated(indices[:0])
        raise
    beat.evaluated(indices[:0])


def use(heartbeat: Heartbeat) -> None:
    """Write this one from now on; clocks that were made before do when they `follow_heartbeat`."""
    _own[0] = heartbeat
