"""The heartbeats of ranks: shared memory that a rank and its data workers write, and a launcher reads.

rank            clock.enter(FORWARD) --> a few stores: time, phase            no system call, no lock, no copy
data worker     the samples that it reads                                     in the same memory
launcher        reads when it likes                                           `launch.hang_watch`

the memory      numbers (float64) | a row for the rank and each data worker (int64) | name of the evaluation set
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from mmap import mmap
from typing import Any, NamedTuple

from lockstep.core.formatting import listed

TIME, PHASE, UPDATES, SECONDS, FIRST, CALLS, STAGE, STEPS, READY, RECORDS = range(10)
"""The numbers: time of the last mark (CLOCK_MONOTONIC) and its phase, `IN_WHOLE` added in a collective of a save or an
evaluation; updates ended; seconds of the last one, and of the first; collectives called; `Stage`; updates of the run
before this process; whether the rank writes its stacks and flight record on request; how often it has written that."""
IN_WHOLE = 100
_NUMBERS = 16
_MOST_WORKERS, _MOST_SAMPLES = 32, 256  # what is beyond isn't noted
_PROCESS, _EVALUATES, _SAMPLE, _NUMBER, _HEAD = range(5)  # of a row: the sample that is read + 1, samples of its batch
_ROW = _HEAD + _MOST_SAMPLES
_NAME_AT, _NAME = _NUMBERS + (2 + _MOST_WORKERS) * _ROW, 16  # the last row is for all other workers
_BYTES = 8 * (_NAME_AT + _NAME)
_MOST_NAMED = 8  # samples


class Stage(IntEnum):
    """The stages of a rank's run."""

    UNKNOWN = 0  # a program that trains with a loop of its own, or does something else
    START = 1
    TRAINING = 2
    END = 3
    LEFT = 4  # the process continues without the other ranks


@dataclass(frozen=True, slots=True)
class Reading:
    """The samples that a rank or data worker is reading.

    Attributes:
        samples: The sample; several: one of them.
        evaluation_set: None: the training data.
    """

    samples: tuple[int, ...]
    evaluation_set: str | None = None

    def __str__(self) -> str:
        names = listed([*map(str, self.samples)], _MOST_NAMED)
        head = "sample" if len(self.samples) == 1 else "one of samples"
        of_set = f"data.evaluation.{self.evaluation_set}" if self.evaluation_set else "an evaluation set"
        return f"{head} {names}" if self.evaluation_set is None else f"{head} {names} of {of_set}"


class Worker(NamedTuple):
    """A data worker that reads samples."""

    number: int
    process: int
    reading: Reading


class Files(NamedTuple):
    """The descriptors of a rank's files.

    Attributes:
        memory: The shared memory.
        stacks: For the stacks of the rank and its data workers.
        record: For its flight record.
        bell, ring: A pipe: a byte written to `ring` requests the flight record.
    """

    memory: int = -1
    stacks: int = -1
    record: int = -1
    bell: int = -1
    ring: int = -1


class Heartbeat:
    """The heartbeat of a rank: its memory, with the numbers `TIME` and the others, and its files."""

    def __init__(self, files: Files | None = None) -> None:
        self.files = files or Files()
        memory = memoryview(mmap(self.files.memory, _BYTES)).cast("B")  # -1: of this process and those that it forks
        self.numbers = memory[: 8 * _NUMBERS].cast("d")
        self._integers = memory.cast("l")
        self._at = _NUMBERS

    def __reduce__(self) -> tuple[Any, ...]:
        from multiprocessing.reduction import DupFd

        return _received, tuple(map(DupFd, self.files))

    def close(self) -> None:
        for file in self.files:
            os.close(file)

    # --- what a rank writes ---

    def become_worker(self, number: int) -> None:
        """Write as a data worker from now on."""
        self._at = _NUMBERS + (1 + min(number, _MOST_WORKERS)) * _ROW

    def begin_read(self, indices: Any, evaluates: bool) -> None:
        """Note samples (int64) before they are read."""
        integers, at, number = self._integers, self._at, min(len(indices), _MOST_SAMPLES)
        integers[at], integers[at + _EVALUATES], integers[at + _SAMPLE] = os.getpid(), evaluates, 0
        integers[at + _HEAD : at + _HEAD + number] = memoryview(indices[:number])
        integers[at + _NUMBER] = number

    def end_read(self) -> None:
        """Note that they have been read."""
        self._integers[self._at + _NUMBER] = 0

    def sample_slot(self) -> tuple[memoryview[Any], int]:
        """Return where to write the sample that is read, + 1; 0: unknown."""
        return self._integers, self._at + _SAMPLE

    def begin_evaluation(self, name: str) -> None:
        """Note the evaluation set of the samples that follow."""
        padded = name.encode()[: 8 * _NAME].ljust(8 * _NAME, b"\0")
        self._integers[_NAME_AT : _NAME_AT + _NAME] = memoryview(padded).cast("l")

    # --- what a launcher reads ---

    def evaluation_set(self) -> str:
        """Return the evaluation set that was read last; empty: unknown."""
        name = self._integers[_NAME_AT : _NAME_AT + _NAME].tobytes()
        return name.rstrip(b"\0").decode("utf-8", "ignore")

    def is_in(self, phase: int) -> bool:
        """Return whether the rank is in a phase, or in a collective of it."""
        return int(self.numbers[PHASE]) in (phase, phase + IN_WHOLE)

    def reading(self) -> Reading | None:
        """Return what this rank's own process reads, if it is known."""
        return self._reading(_NUMBERS)

    def workers(self) -> list[Worker]:
        """Return the data workers that read samples."""
        rows = ((number, _NUMBERS + (1 + number) * _ROW) for number in range(_MOST_WORKERS))
        return [
            Worker(number, self._integers[at], reading)
            for number, at in rows
            if (reading := self._reading(at)) is not None
        ]

    def _reading(self, at: int) -> Reading | None:
        _, evaluates, sample, number = self._integers[at : at + _HEAD].tolist()
        if not number:
            return None
        samples = [sample - 1] if sample else self._integers[at + _HEAD : at + _HEAD + number].tolist()
        return Reading(tuple(samples), self.evaluation_set() if evaluates else None)


def _received(*files: Any) -> Heartbeat:
    return Heartbeat(Files(*(file.detach() for file in files)))


def shared_heartbeat() -> Heartbeat:
    """Make a heartbeat for other processes."""
    bell, ring = os.pipe()
    memory, stacks, record = (os.memfd_create("lockstep") for _ in range(3))
    os.ftruncate(memory, _BYTES)
    return Heartbeat(Files(memory, stacks, record, bell, ring))


def begin_stage(stage: Stage, steps: int = 0) -> None:
    """Note that this rank begins a stage; its run has made `steps` steps."""
    numbers = own().numbers
    numbers[STAGE], numbers[TIME] = stage, time.perf_counter()
    if stage is Stage.TRAINING:
        numbers[STEPS] = steps - numbers[UPDATES]


_own = [Heartbeat()]


def own() -> Heartbeat:
    """Return the heartbeat of this process."""
    return _own[0]


@contextmanager
def reads(indices: Any, evaluates: bool) -> Iterator[None]:
    """Note samples while the block reads them; if the process dies, the note stays for its launcher."""
    beat = own()
    beat.begin_read(indices, evaluates)
    try:
        yield
    except Exception:
        beat.end_read()
        raise
    beat.end_read()


def use(heartbeat: Heartbeat) -> None:
    """Write this one from now on; existing clocks keep writing the old one."""
    _own[0] = heartbeat
