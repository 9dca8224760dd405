"""The meters of all ranks: what each does, and where its time goes.

    on every rank   clock, gauges --thread--> notice: cumulative, every 2 s, also while the rank is stuck
    on rank 0       all notices --thread--> live.json     as they are, for `lockstep top`
                                       `--> ranks.jsonl   a line an interval: columns by rank, for the report
                                       `--> MeterReport   min, mean, max over ranks, for the monitors

No update waits for any of it: the threads have connections and files of their own.
"""

from __future__ import annotations

import json
import logging
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lockstep.core.phase_clock import UPDATE_PHASES, Durations, Phase, UpdateTimes

if TYPE_CHECKING:
    from lockstep.core.phase_clock import PhaseClock
    from lockstep.distributed.notice_board import NoticeBoard

_log = logging.getLogger("lockstep.monitor")
POST_S = 2.0
"""Seconds between two notices of a rank."""
_SLOW = 1.2
_SLOW_SHARE = 0.05
"""A straggler computes 1.2 times as long as the median rank, and by 5 % of an update longer."""
SHORTEST_S = POST_S
"""The shortest interval that names stragglers: in a shorter one, of a run that has just begun, they are chance."""

Gauges = Callable[[], Mapping[str, float]]


@dataclass(frozen=True, slots=True)
class RankNotice:
    """A rank's state and totals, as it posts them.

    Attributes:
        time: Unix time of the rank's host.
        step: Updates of the run that it has made.
        phase: In which it is, for `phase_seconds`.
        times: Of all its updates since this attempt began.
        gauges: Latest values by name, such as `memory_used`.
    """

    rank: int
    host: str
    process: int
    time: float
    step: int
    phase: Phase
    phase_seconds: float
    times: UpdateTimes
    gauges: Mapping[str, float] = field(default_factory=dict)

    def encode(self) -> bytes:
        durations = self.times.durations
        record = {
            "rank": self.rank,
            "host": self.host,
            "process": self.process,
            "time": self.time,
            "step": self.step,
            "phase": self.phase.name.lower(),
            "phase_seconds": self.phase_seconds,
            "bins": list(durations.bins.items()),
            "moments": [durations.count, durations.total, durations.squares, durations.low, durations.high],
            "split": self.times.split,
            "measured": self.times.measured,
            "evaluation": self.times.evaluation,
            "gauges": dict(self.gauges),
        }
        return json.dumps(record).encode()

    @classmethod
    def decode(cls, data: bytes) -> RankNotice:
        record: dict[str, Any] = json.loads(data)
        bins = Counter({int(index): int(count) for index, count in record["bins"]})
        times = UpdateTimes(
            Durations(bins, *record["moments"]), record["split"], record["measured"], record["evaluation"]
        )
        return cls(
            record["rank"],
            record["host"],
            record["process"],
            record["time"],
            record["step"],
            Phase[record["phase"].upper()],
            record["phase_seconds"],
            times,
            record["gauges"],
        )


@dataclass(frozen=True, slots=True)
class RankInterval:
    """The updates of a rank in an interval.

    Attributes:
        updates: Number of updates that were timed.
        seconds, median, slowest: Of an update: mean, median and 95th percentile. NaN if there was none.
        deviation: Standard deviation of an update's seconds.
        stalled: Seconds by which the longest update raises the mean above the median.
        split: Seconds of an update by phase, over those whose phases were measured; none if there was none.
        silent: Seconds since the rank's last notice.
    """

    notice: RankNotice
    updates: int
    seconds: float
    median: float
    slowest: float
    deviation: float
    split: Mapping[str, float]
    silent: float = 0.0
    stalled: float = 0.0

    @classmethod
    def between(cls, earlier: RankNotice | None, notice: RankNotice, silent: float = 0.0) -> RankInterval:
        times = notice.times if earlier is None else notice.times.since(earlier.times)
        durations = times.durations
        split: dict[str, float] = {}
        if times.measured:
            split = {phase.name.lower(): times.split[phase] / times.measured for phase in UPDATE_PHASES}
        median, count = durations.percentile(0.5), durations.count
        return cls(
            notice,
            count,
            durations.mean,
            median,
            durations.percentile(0.95),
            durations.deviation,
            split,
            silent,
            (durations.percentile(1.0) - median) / count if count else 0.0,
        )


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that the others wait for.

    Attributes:
        ratio: Of its computing time to the median rank's.
        phase: The phase that differs most.
    """

    rank: int
    host: str
    ratio: float
    phase: str


@dataclass(frozen=True, slots=True)
class MeterReport:
    """The meters of all ranks over an interval.

    Attributes:
        step: Of the run, at the interval's end.
        seconds: Length of the interval.
        ranks: In the order of ranks; those that have posted nothing yet are left out.
    """

    step: int
    seconds: float
    ranks: tuple[RankInterval, ...]

    def split(self) -> dict[str, float]:
        """Return the mean over ranks of an update's seconds by phase; nothing if none was measured."""
        splits = [rank.split for rank in self.ranks if rank.split]
        return {name: statistics.fmean(split[name] for split in splits) for name in splits[0]} if splits else {}

    def gauges(self) -> dict[str, tuple[float, float, float]]:
        """Return min, mean and max over ranks of each gauge."""
        names = dict.fromkeys(name for rank in self.ranks for name in rank.notice.gauges)
        values = {
            name: [rank.notice.gauges[name] for rank in self.ranks if name in rank.notice.gauges] for name in names
        }
        return {name: (min(of_ranks), statistics.fmean(of_ranks), max(of_ranks)) for name, of_ranks in values.items()}

    def stragglers(self) -> list[Straggler]:
        """Return the ranks that the others wait for, the slowest first; none of too short an interval."""
        if self.seconds < SHORTEST_S:
            return []
        known = [rank for rank in self.ranks if rank.split]
        return stragglers_of(
            [RankTimes(rank.notice.rank, rank.notice.host, rank.seconds, rank.split, rank.stalled) for rank in known]
        )


@dataclass(frozen=True, slots=True)
class RankTimes:
    """The seconds of a rank's update, in all and by phase.

    Attributes:
        stalled: As of `RankInterval`: one update that takes long, as where a rank hangs, makes no straggler.
    """

    rank: int
    host: str
    seconds: float
    split: Mapping[str, float]
    stalled: float = 0.0

    @property
    def computing(self) -> float:
        """Seconds in which it doesn't wait for other ranks."""
        return sum(self.split.values()) - self.split.get("communication", 0.0)

    @property
    def usual(self) -> float:
        """The same without the longest update."""
        return self.computing - self.stalled


def stragglers_of(ranks: Sequence[RankTimes]) -> list[Straggler]:
    """Return the ranks that the others wait for, the slowest first."""
    if len(ranks) < 2:
        return []
    usual = statistics.median_low(rank.computing for rank in ranks)
    margin = _SLOW_SHARE * statistics.fmean(rank.seconds for rank in ranks)
    slow = [rank for rank in ranks if rank.usual > max(_SLOW * usual, usual + margin)]
    names = dict.fromkeys(name for rank in ranks for name in rank.split)
    usual_split = {name: statistics.median_low(rank.split.get(name, 0.0) for rank in ranks) for name in names}

    def excess(rank: RankTimes) -> str:
        phases = [name for name in rank.split if name != "communication"]
        return max(phases, key=lambda name: rank.split[name] - usual_split[name])

    return [
        Straggler(rank.rank, rank.host, rank.usual / usual, excess(rank))
        for rank in sorted(slow, key=lambda rank: -rank.usual)
    ]


def meter_values(report: MeterReport) -> dict[str, float]:
    """Return the values of a report that curves are drawn of: `time/PHASE`, `ranks/...`, `GAUGE/max`, ..."""
    values = {f"time/{name}_seconds": seconds for name, seconds in report.split().items()}
    steps = [rank.seconds for rank in report.ranks if rank.updates]
    if steps:
        values["ranks/step_seconds"] = statistics.fmean(steps)
        values["ranks/slowest_step_seconds"] = max(rank.slowest for rank in report.ranks if rank.updates)
    for name, (low, mean, high) in report.gauges().items():
        values |= {f"{name}/min": low, f"{name}/mean": mean, f"{name}/max": high}
    return values


class RankMeters:
    """Posts this rank's notices from a thread.

    Args:
        step: Returns the number of the run's updates.
        gauges: Returns the latest values; one that fails otherwise than by an OSError is left out from then on.
    """

    def __init__(
        self,
        clock: PhaseClock,
        board: NoticeBoard,
        rank: int,
        step: Callable[[], int],
        gauges: Sequence[Gauges] = (),
        process: int = 0,
    ) -> None:
        self._clock = clock
        self._board = board
        self._rank = rank
        self._step = step
        self._gauges = list(gauges)
        self._failing: set[Gauges] = set()
        self._process = process
        self._host = socket.gethostname()
        self._times = UpdateTimes()

    def notice(self) -> RankNotice:
        """Return what this rank would post now."""
        self._times.merge(self._clock.take())
        position = self._clock.position()
        values: dict[str, float] = {}
        for gauge in list(self._gauges):
            try:
                values.update(gauge())
                self._failing.discard(gauge)
            except Exception as error:
                passes = isinstance(error, OSError)  # what it reads may be there again, such as the folder of a run
                if not passes:
                    self._gauges.remove(gauge)
                if gauge not in self._failing:
                    until = "until it can read them" if passes else "from now on"
                    text = f"{type(error).__name__}: {error}"
                    _log.warning("values of a meter of rank %d are missing %s: %s", self._rank, until, text)
                self._failing.add(gauge)
        return RankNotice(
            self._rank,
            self._host,
            self._process,
            time.time(),
            self._step(),
            position.phase,
            position.seconds,
            self._times,
            values,
        )

    def post(self, notice: RankNotice) -> None:
        """Post a notice. Raises RuntimeError if the ranks' store has ended."""
        self._board.post(notice.encode())
