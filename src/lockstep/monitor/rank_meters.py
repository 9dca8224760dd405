"""The meters of all ranks: what each is doing, and where its time goes.

on every rank   clock, gauges --thread--> notice: cumulative, every 2 s, also while the rank is stuck
on rank 0       all notices --thread--> live.json     as they are, for `lockstep top`; replaced every 2 s
                                   `--> ranks.jsonl   a line an interval: columns by rank, for the report
                                   `--> MeterReport   min, mean, max over ranks, for the monitors

live.json    {"time": 1790000000.0, "step": 120, "ranks": [{"rank": 0, "host": "a", "step": 120, ...}]}
ranks.jsonl  {"step": 120, "time": ..., "seconds": 10.0, "ranks": [0, 1], "step_seconds": [0.05, 0.05], "slowest":
              [...], "split": {"data": [0.001, 0.002], ...}, "gauges": {"memory_used": [...]}, "stragglers": [...]}
"""

from __future__ import annotations

import json
import logging
import math
import os
import socket
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from lockstep.core.files import write_atomically
from lockstep.core.phase_clock import UPDATE_PHASES, Durations, Phase, UpdateTimes
from lockstep.monitor.folder import lock_holder
from lockstep.monitor.jsonl import LineFile, finite, line
from lockstep.monitor.nvidia import gpu_errors, gpu_line

if TYPE_CHECKING:
    from pathlib import Path

    from lockstep.core.phase_clock import PhaseClock
    from lockstep.distributed.notice_board import NoticeBoard

_log = logging.getLogger("lockstep.monitor")
POST_S = 2.0
"""Seconds between two notices of a rank."""
_SLOW = 1.2
_SLOW_SHARE = 0.05
"""A straggler computes 1.2 times as long as the median rank, and by 5 % of an update longer."""

Gauges = Callable[[], Mapping[str, float]]
LIVE = "live.json"
RANKS = "ranks.jsonl"
_PATIENCE_S = 5.0  # for the thread's end
_SECONDS_PER_RANK = 0.1  # of an interval: a line of 1,024 ranks has 100 KB


@dataclass(frozen=True, slots=True)
class RankNotice:
    """A rank's state as it posts it, with the times of all its updates since the attempt began."""

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
        bins = list(self.times.durations.bins.items())  # JSON has no numbers as keys
        record = asdict(self)
        record["times"]["durations"]["bins"] = bins
        return json.dumps(record).encode()

    @classmethod
    def decode(cls, data: bytes) -> RankNotice:
        record: dict[str, Any] = json.loads(data)
        times, durations = record["times"], record["times"]["durations"]
        durations = Durations(**{**durations, "bins": Counter(dict(durations["bins"]))})
        return cls(
            **{**record, "phase": Phase(record["phase"]), "times": UpdateTimes(**{**times, "durations": durations})}
        )


@dataclass(frozen=True, slots=True)
class RankInterval:
    """The updates of a rank in an interval.

    Attributes:
        updates: Number of updates that were timed.
        seconds, slowest: Of an update: mean and 95th percentile; NaN if there was none.
        split: Seconds of an update by phase; empty if none was measured.
        silent: Seconds since the rank's last notice.
        stalled: Seconds that the longest update adds to the mean, above the median.
    """

    notice: RankNotice
    updates: int
    seconds: float
    slowest: float
    split: Mapping[str, float]
    silent: float = 0.0
    stalled: float = 0.0

    @classmethod
    def between(cls, earlier: RankNotice | None, notice: RankNotice, silent: float = 0.0) -> RankInterval:
        times = notice.times if earlier is None else notice.times.since(earlier.times)
        durations, count = times.durations, times.durations.count
        split: dict[str, float] = {}
        if times.measured:
            split = {phase.name.lower(): times.split[phase] / times.measured for phase in UPDATE_PHASES}
        stalled = (durations.percentile(1.0) - durations.percentile(0.5)) / count if count else 0.0
        return cls(notice, count, durations.mean, durations.percentile(0.95), split, silent, stalled)


@dataclass(frozen=True, slots=True)
class Straggler:
    """A rank that the others wait for: its computing time over the median rank's, and the phase that differs most."""

    rank: int
    host: str
    ratio: float
    phase: str


@dataclass(frozen=True, slots=True)
class MeterReport:
    """The meters of all ranks that have posted, over an interval of `seconds` that ends at `step`."""

    step: int
    seconds: float
    ranks: tuple[RankInterval, ...]

    def split(self) -> dict[str, float]:
        """Return the mean over ranks of an update's seconds by phase."""
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
        """Return the ranks that the others wait for, the slowest first."""
        if self.seconds < POST_S:  # of a run that has just begun: chance
            return []
        times = [
            RankTimes(rank.notice.rank, rank.notice.host, rank.seconds, rank.split, rank.stalled)
            for rank in self.ranks
            if rank.split
        ]
        return stragglers_of(times)


@dataclass(frozen=True, slots=True)
class RankTimes:
    """The seconds of a rank's update, in all and by phase; `stalled` as of `RankInterval`."""

    rank: int
    host: str
    seconds: float
    split: Mapping[str, float]
    stalled: float = 0.0

    @property
    def computing(self) -> float:
        """Seconds without waiting for other ranks."""
        return sum(self.split.values()) - self.split.get("communication", 0.0)

    @property
    def usual(self) -> float:
        """The same without the longest update: a rank that hung once is no straggler."""
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
    """Return the values of a report's curves: `time/PHASE_seconds`, `ranks/...`, `GAUGE/max`, ..."""
    values = {f"time/{name}_seconds": seconds for name, seconds in report.split().items()}
    steps = [rank.seconds for rank in report.ranks if rank.updates]
    if steps:
        values["ranks/step_seconds"] = statistics.fmean(steps)
        values["ranks/slowest_step_seconds"] = max(rank.slowest for rank in report.ranks if rank.updates)
    for name, (low, mean, high) in report.gauges().items():
        values |= {f"{name}/min": low, f"{name}/mean": mean, f"{name}/max": high}
    return values


class MeterFiles:
    """Collects the notices of all ranks, and writes them; `show` receives the report of each interval."""

    def __init__(self, folder: Path, board: NoticeBoard, interval: float, ranks: int) -> None:
        self.file = LineFile(folder / RANKS)
        self.show: Callable[[MeterReport], object] = lambda report: None
        self._folder = folder
        self._live = folder / LIVE
        self._holder = lock_holder(folder)
        self._board = board
        self._interval = max(interval, ranks * _SECONDS_PER_RANK)
        self._data: list[bytes | None] = [None] * ranks
        self._changed = [0.0] * ranks  # when a rank's notice was another than before
        self._before: dict[int, RankNotice] = {}  # at the last interval's end
        self._began = time.monotonic()

    def look(self, *, last: bool = False) -> None:
        """Read the notices and replace live.json; add a line if the interval is over, or it is the last look."""
        now = time.monotonic()
        for rank, data in enumerate(self._board.latest()):
            if data != self._data[rank]:
                self._data[rank], self._changed[rank] = data, now
        notices = {rank: RankNotice.decode(data) for rank, data in enumerate(self._data) if data is not None}
        if not notices:
            return
        ranks = tuple(
            RankInterval.between(self._before.get(rank), notice, now - self._changed[rank])
            for rank, notice in notices.items()
        )
        report = MeterReport(max(notice.step for notice in notices.values()), now - self._began, ranks)
        if not self._is_own():
            return
        self._write_live(report)
        if last or now - self._began >= self._interval:
            self._began, self._before = now, notices
            if any(rank.updates for rank in ranks):
                self.show(report)
                self.file.write(line(_columns(report)))

    def close(self) -> None:
        """Close the file and remove live.json."""
        self.file.close()
        if self._is_own():
            with suppress(OSError):
                self._live.unlink(missing_ok=True)

    def _is_own(self) -> bool:
        return lock_holder(self._folder) == self._holder

    def _write_live(self, report: MeterReport) -> None:
        text = json.dumps(finite(_live(report)), allow_nan=False)
        with suppress(OSError):  # the warnings on the run's other files are enough
            write_atomically(self._live, text + "\n", durable=False)


class RankMeters:
    """Posts this rank's notices every `seconds`, from a thread; on rank 0, which has `files`, collects all ranks'.

    Args:
        step: Returns the number of the run's updates.
        gauges: Return the latest values. A gauge that raises is dropped; after an OSError, only this time.
    """

    def __init__(
        self,
        clock: PhaseClock,
        board: NoticeBoard,
        rank: int,
        step: Callable[[], int],
        gauges: Sequence[Gauges] = (),
        files: MeterFiles | None = None,
        seconds: float = POST_S,
    ) -> None:
        self._clock = clock
        self._board = board
        self._rank = rank
        self._step = step
        self._gauges = list(gauges)
        self._files = files
        self._seconds = seconds
        self._host = socket.gethostname()
        self._times = UpdateTimes()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lockstep-meters", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the thread, which posts for the last time, unless it waits for a device or a file system."""
        if self._ended.is_set():
            return
        self._ended.set()
        self._thread.join(timeout=_PATIENCE_S)

    def finish(self) -> None:
        self.stop()
        if self._files is not None and self._thread.is_alive():
            _log.warning("the meters of this rank don't answer; the run ends without the last ones")
        elif self._files is not None:
            with suppress(RuntimeError):
                self._files.look(last=True)
            self._files.close()

    def notice(self) -> RankNotice:
        self._times.merge(self._clock.take())
        position = self._clock.position()
        values: dict[str, float] = {}
        for gauge in list(self._gauges):
            try:
                values.update(gauge())
            except OSError:  # what it reads may be there again, such as the folder of a run
                continue
            except Exception as error:
                self._gauges.remove(gauge)
                _log.warning("values of a meter of rank %d are missing from now on: %r", self._rank, error)
        return RankNotice(
            self._rank,
            self._host,
            os.getpid(),
            time.time(),
            self._step(),
            position.phase,
            position.seconds,
            self._times,
            values,
        )

    def _run(self) -> None:
        try:
            notice = self.notice()
            with suppress(RuntimeError):  # the ranks' store has ended
                self._board.post(notice.encode())
                while not self._ended.wait(self._seconds):
                    notice = self.notice()
                    self._board.post(notice.encode())
                    if self._files is not None:
                        self._files.look()
            last = self.notice()
            known = [*gpu_errors(notice.gauges)]
            for text in gpu_errors(last.gauges):  # which may be why this rank ends
                if text not in known:
                    _log.error("%s", gpu_line({last.rank: last.host}, text))
            with suppress(RuntimeError):
                self._board.post(last.encode())
        except Exception:
            _log.warning("the meters of this rank have failed; the run continues without them", exc_info=True)


def _live(report: MeterReport) -> dict[str, Any]:
    return {
        "time": time.time(),
        "step": report.step,
        "ranks": [
            {
                **{name: getattr(rank.notice, name) for name in ("rank", "host", "process", "step", "gauges")},
                "phase": rank.notice.phase.name.lower(),
                "phase_seconds": round(rank.notice.phase_seconds + rank.silent, 3),
                "silent": round(rank.silent, 3),
                "step_seconds": rank.seconds,
                "slowest": rank.slowest,
                "split": rank.split,
            }
            for rank in report.ranks
        ],
        "stragglers": [asdict(straggler) for straggler in report.stragglers()],
    }


def _columns(report: MeterReport) -> dict[str, Any]:
    ranks = report.ranks
    splits = dict.fromkeys(name for rank in ranks for name in rank.split)
    gauges = dict.fromkeys(name for rank in ranks for name in rank.notice.gauges)
    return {
        "step": report.step,
        "time": round(time.time(), 3),
        "seconds": round(report.seconds, 3),
        "ranks": [rank.notice.rank for rank in ranks],
        "updates": [rank.updates for rank in ranks],
        "step_seconds": [_short(rank.seconds) for rank in ranks],
        "slowest": [_short(rank.slowest) for rank in ranks],
        "split": {name: [_short(rank.split.get(name)) for rank in ranks] for name in splits},
        "gauges": {name: [_short(rank.notice.gauges.get(name)) for rank in ranks] for name in gauges},
        "stragglers": [asdict(straggler) for straggler in report.stragglers()],
    }


def _short(value: float | None) -> float | None:
    if value is None or not math.isfinite(value):
        return None
    return float(f"{value:.6g}")
