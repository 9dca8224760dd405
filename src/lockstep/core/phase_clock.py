"""The clock of a rank: where the time of its steps goes.

    mark         DATA     FORWARD      BACKWARD    COMMUNICATION   BACKWARD  OPTIMIZER   HOST        updated()
    main thread  |--------|------------|-----------|---------------|---------|-----------|-----------|
    device       the same marks as events of its stream, in one of several steps, read once they have happened

Every moment belongs to one phase. A mark costs 0.3 us, and is also the rank's heartbeat (`core.heartbeat`).
"""

from __future__ import annotations

import math
import operator
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from typing import Any

from lockstep.core import heartbeat


class Phase(IntEnum):
    """A part of an update, or what interrupts the updates."""

    HOST = 0  # everything else: monitors, bookkeeping, user code between updates
    DATA = 1  # waiting for the next batch
    FORWARD = 2
    BACKWARD = 3
    COMMUNICATION = 4  # waiting for other ranks, or for what they send
    OPTIMIZER = 5
    SAVE = 6  # waiting for a save
    EVALUATION = 7  # no part of an update; the profiler, too


UPDATE_PHASES = tuple(phase for phase in Phase if phase is not Phase.EVALUATION)
Mark = tuple[float, Phase | None]
"""A time of the host's clock, and the phase that begins; None: an update has ended."""
_HOST, _COMMUNICATION, _SAVE, _EVALUATION = Phase.HOST, Phase.COMMUNICATION, Phase.SAVE, Phase.EVALUATION
_WHOLE = (Phase.SAVE, Phase.EVALUATION)  # collectives in them belong to them
_TIME, _PHASE, _IN_WHOLE = heartbeat.TIME, heartbeat.PHASE, heartbeat.IN_WHOLE
_SECONDS, _UPDATES = heartbeat.SECONDS, heartbeat.UPDATES
_NO_TIMES = (0.0,) * len(Phase)
_RATIO = math.log(1.02)  # between the bins of durations: percentiles are exact to 1 %
_SHORTEST = 1e-7  # seconds
_MEASURED_ONE_OF = 8  # of this many updates, one is measured by phase on a device
_MAX_WAITING = 4  # measured updates with unread events


@dataclass(slots=True)
class Durations:
    """A histogram of durations in bins of 2 %, with exact sums.

    Attributes:
        total: Sum in seconds.
        low, high: Shortest and longest; infinity and 0 if there is none.
    """

    bins: Counter[int] = field(default_factory=Counter)
    count: int = 0
    total: float = 0.0
    low: float = math.inf
    high: float = 0.0

    def add(self, seconds: float) -> None:
        self.bins[round(math.log(max(seconds, _SHORTEST)) / _RATIO)] += 1
        self.count += 1
        self.total += seconds
        self.low, self.high = min(self.low, seconds), max(self.high, seconds)

    def merge(self, other: Durations) -> None:
        self.bins.update(other.bins)
        self.count += other.count
        self.total += other.total
        self.low, self.high = min(self.low, other.low), max(self.high, other.high)

    def since(self, earlier: Durations) -> Durations:
        """Return what was added since `earlier`; its extremes are exact to 1 %."""
        bins = self.bins - earlier.bins
        low, high = (math.exp(index * _RATIO) for index in (min(bins), max(bins))) if bins else (math.inf, 0.0)
        count, total = self.count - earlier.count, self.total - earlier.total
        return Durations(bins, count, total, max(low, self.low), min(high, self.high))

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else math.nan

    def percentile(self, share: float) -> float:
        """Return the duration that a share in [0, 1] of all doesn't exceed, to 1 %; NaN if there is none."""
        wanted, passed = share * self.count, 0
        for index in sorted(self.bins):
            passed += self.bins[index]
            if passed >= wanted:
                return min(max(math.exp(index * _RATIO), self.low), self.high)
        return math.nan


@dataclass(slots=True)
class UpdateTimes:
    """Times of the steps in some interval.

    Attributes:
        durations: Of whole steps, without evaluations.
        split: Seconds by `Phase`, over the steps measured by phase.
        measured: Number of these steps: all on a CPU, one of several on a device.
        evaluation: Seconds of evaluations.
    """

    durations: Durations = field(default_factory=Durations)
    split: list[float] = field(default_factory=lambda: list(_NO_TIMES))
    measured: int = 0
    evaluation: float = 0.0

    def merge(self, other: UpdateTimes) -> None:
        self.durations.merge(other.durations)
        self.split = [mine + more for mine, more in zip(self.split, other.split, strict=True)]
        self.measured += other.measured
        self.evaluation += other.evaluation

    def since(self, earlier: UpdateTimes) -> UpdateTimes:
        """Return what was added since `earlier`."""
        split = [mine - before for mine, before in zip(self.split, earlier.split, strict=True)]
        measured, evaluation = self.measured - earlier.measured, self.evaluation - earlier.evaluation
        return UpdateTimes(self.durations.since(earlier.durations), split, measured, evaluation)


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a rank in its steps.

    Attributes:
        updates: Steps ended since the clock was made.
        seconds: Since the phase began.
    """

    updates: int
    phase: Phase
    seconds: float


class PhaseClock:
    """Measures the phases of one rank's steps. Marks come from the thread that trains, `take` from any.

    Args:
        mark: Returns an event with a time, recorded on the device's stream; None: the host's clock counts.
    """

    def __init__(self, mark: Callable[[], Any] | None = None, now: Callable[[], float] = time.perf_counter) -> None:
        self._mark = mark
        self._now = now
        self._phase = Phase.HOST
        self._since = self._ended = now()
        self._seconds = list(_NO_TIMES)
        self._updates = 0
        self._times = UpdateTimes()
        self._lock = threading.Lock()  # of the times
        self._events: list[tuple[Phase, Any]] | None = None  # phases and their beginnings, if this update is measured
        self._waiting: deque[list[tuple[Phase, Any]]] = deque()
        self._marks: list[Mark] | None = None  # if they are recorded
        self._beat = heartbeat.own().numbers

    def record(self) -> None:
        """Keep the marks from now on, for a profile."""
        self._marks = [(self._ended, None), (self._ended, Phase.HOST), (self._now(), self._phase)]

    def recorded(self) -> list[Mark]:
        """Stop keeping marks; return those since `record`."""
        marks, self._marks = self._marks or [], None
        return marks

    def enter(self, phase: Phase) -> Phase:
        """Begin a phase; return the one that it interrupts."""
        now, before = self._now(), self._phase
        if phase is _COMMUNICATION and before in _WHOLE:
            phase = before
            self._beat[_PHASE] = before + _IN_WHOLE
        else:
            self._beat[_PHASE] = phase
        self._beat[_TIME] = now
        self._seconds[before] += now - self._since
        self._since, self._phase = now, phase
        if self._marks is not None:
            self._marks.append((now, phase))
        if self._events is not None and self._mark is not None and phase is not before:
            self._events.append((phase, self._mark()))
        return before

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Spend the block in a phase."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def updated(self) -> None:
        """End a step."""
        self.enter(_HOST)
        self._ended = self._since
        if self._marks is not None:
            self._marks[-1:] = [(self._ended, None), (self._ended, _HOST)]
        seconds, self._seconds = self._seconds, [*_NO_TIMES]
        self._updates += 1
        without_evaluation = sum(seconds) - seconds[_EVALUATION]
        beat = self._beat
        beat[_SECONDS], beat[_UPDATES] = without_evaluation - seconds[_SAVE], self._updates
        with self._lock:
            times = self._times
            if self._updates > 1:  # the first one includes what torch does once
                times.durations.add(without_evaluation)
            else:
                beat[heartbeat.FIRST] = beat[_SECONDS]
            times.evaluation += seconds[_EVALUATION]
            if self._mark is not None:
                self._measure_on_device(times, self._mark)
            elif self._updates > 1:
                times.split = list(map(operator.add, times.split, seconds))
                times.measured += 1

    def take(self) -> UpdateTimes:
        """Return the times since the last call, from any thread."""
        with self._lock:
            taken, self._times = self._times, UpdateTimes()
        return taken

    def position(self) -> Position:
        """Return what the rank does now, from any thread."""
        return Position(self._updates, self._phase, self._now() - self._since)

    def _measure_on_device(self, times: UpdateTimes, mark: Callable[[], Any]) -> None:
        """End a step's measurement, begin the next if it is its turn, and read those that are done."""
        if self._events is not None:
            self._events.append((Phase.HOST, mark()))
            self._waiting.append(self._events)
            self._events = None
        if self._updates % _MEASURED_ONE_OF == 0 and len(self._waiting) < _MAX_WAITING:
            self._events = [(Phase.HOST, mark())]
        while self._waiting and self._waiting[0][-1][1].query():
            marks = self._waiting.popleft()
            for (phase, event), (_, following) in pairwise(marks):
                times.split[phase] += event.elapsed_time(following) / 1000
            times.measured += 1
