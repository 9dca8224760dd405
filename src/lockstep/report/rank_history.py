"""Reads ranks.jsonl: the times and gauges of a run's ranks, interval by interval.

Damaged lines are counted and left out. Of a very long run every second, fourth, ... interval is kept.
"""

from __future__ import annotations

import json
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.core.formatting import counted
from lockstep.monitor.jsonl import as_number
from lockstep.monitor.rank_meters import RANKS, Straggler
from lockstep.report.series import Numbers

_MOST_INTERVALS = 20_000
_MOST_COLUMNS = 1_000_000  # intervals x ranks
_MOST_RANKS = 16_384
_LONGEST_LINE = 1 << 25  # bytes; a line of 16,384 ranks has 2 MB


@dataclass(frozen=True, slots=True)
class Interval:
    """The times of all ranks in an interval of `seconds` that ends at `step`.

    Columns have a number for each rank; NaN: unknown. `step_seconds` is the mean of a rank's updates, `split` the
    seconds of an update by phase.
    """

    step: int
    seconds: float
    ranks: tuple[int, ...]
    updates: Numbers
    step_seconds: Numbers
    split: Mapping[str, Numbers] = field(default_factory=dict)
    gauges: Mapping[str, Numbers] = field(default_factory=dict)
    stragglers: tuple[Straggler, ...] = ()

    @property
    def computing(self) -> Numbers:
        """Seconds of an update without each rank's waits for others; the whole if no phase was measured."""
        parts = [column for name, column in self.split.items() if name != "communication"]
        return np.sum(parts, axis=0) if parts else self.step_seconds


@dataclass(frozen=True, slots=True)
class RankHistory:
    """All intervals of a run, by step, and the number of damaged lines."""

    intervals: tuple[Interval, ...] = ()
    damaged: int = 0

    @property
    def flaws(self) -> list[str]:
        return [f"{counted(self.damaged, 'line')} of {RANKS} can't be read."] if self.damaged else []

    @property
    def steps(self) -> Numbers:
        return np.array([float(interval.step) for interval in self.intervals])

    def split(self) -> dict[str, float]:
        """Return the mean seconds of an update by phase, over all ranks and intervals, weighted by updates."""
        sums: dict[str, float] = {}
        weight = 0.0
        for interval in self.intervals:
            parts = np.array([*interval.split.values()]).reshape(-1, len(interval.ranks))
            known = np.isfinite(parts).all(axis=0) & (interval.updates > 0) & bool(interval.split)
            weight += interval.updates[known].sum()
            for name, seconds in zip(interval.split, (parts * interval.updates)[:, known].sum(axis=1), strict=True):
                sums[name] = sums.get(name, 0.0) + float(seconds)
        return {name: seconds / weight for name, seconds in sums.items()} if weight else {}

    def step_seconds(self) -> float | None:
        """Return the mean seconds of an update over all ranks and intervals; None if none was timed."""
        if not self.intervals:
            return None
        seconds, updates = (
            np.concatenate([getattr(i, name) for i in self.intervals]) for name in ("step_seconds", "updates")
        )
        timed = np.isfinite(seconds) & (updates > 0)
        return float((seconds * updates)[timed].sum() / updates[timed].sum()) if timed.any() else None

    def computing(self) -> tuple[list[int], Numbers, Numbers]:
        """Return all ranks, the seconds that each computes in an update, [interval, rank], and each rank's mean."""
        ranks = sorted({rank for interval in self.intervals for rank in interval.ranks})
        place = {rank: at for at, rank in enumerate(ranks)}
        shape = len(self.intervals), len(ranks)
        seconds, updates = np.full(shape, np.nan), np.zeros(shape)
        for row, interval in enumerate(self.intervals):
            at = [place[rank] for rank in interval.ranks]
            seconds[row, at] = np.where(interval.updates > 0, interval.computing, np.nan)
            updates[row, at] = np.where(np.isfinite(seconds[row, at]), interval.updates, 0.0)
        counts = updates.sum(axis=0)
        means = np.nansum(seconds * updates, axis=0) / np.maximum(counts, 1e-9)
        return ranks, seconds, np.where(counts > 0, means, np.nan)

    def phases(self) -> dict[str, Numbers]:
        """Return the mean over ranks of each phase's seconds in an update, by interval."""
        names = dict.fromkeys(name for interval in self.intervals for name in interval.split)
        return {name: _over_ranks([each.split.get(name) for each in self.intervals])[:, 1] for name in names}

    def gauge(self, name: str) -> Numbers | None:
        """Return min, mean and max over ranks of a gauge, [interval, 3]; None if no rank has it."""
        values = _over_ranks([interval.gauges.get(name) for interval in self.intervals])
        return values if np.isfinite(values).any() else None

    def peak(self, gauge: str) -> tuple[float, int] | None:
        """Return the largest value of a gauge and its rank; None if no rank has it."""
        return max(((max(values), rank) for rank, values in self._by_rank(gauge).items()), default=None)

    def medians(self, gauge: str) -> dict[int, float]:
        """Return the median of a gauge over all intervals, by rank."""
        return {rank: statistics.median(values) for rank, values in self._by_rank(gauge).items()}

    def _by_rank(self, gauge: str) -> dict[int, list[float]]:
        values: dict[int, list[float]] = {}
        for interval in self.intervals:
            for value, rank in zip(interval.gauges.get(gauge, ()), interval.ranks, strict=False):
                if math.isfinite(value):
                    values.setdefault(rank, []).append(float(value))
        return values

    def stragglers(self) -> list[tuple[int, Straggler]]:
        """Return in how many intervals the others waited for a rank, with its median ratio, the most frequent first."""
        by_rank: dict[int, list[Straggler]] = {}
        for straggler in (each for interval in self.intervals for each in interval.stragglers):
            by_rank.setdefault(straggler.rank, []).append(straggler)
        frequent = []
        for each in by_rank.values():
            ratio = statistics.median(straggler.ratio for straggler in each)
            phase = Counter(straggler.phase for straggler in each).most_common(1)[0][0]
            frequent.append((len(each), replace(each[-1], ratio=ratio, phase=phase)))
        return sorted(frequent, key=lambda item: -item[0])


def read_rank_history(run: Path) -> RankHistory:
    """Return the content of a run's ranks.jsonl, empty if there is none. Raises OSError."""
    kept: dict[int, Interval] = {}
    damaged, stride, columns = 0, 1, 0
    try:
        file = (run / RANKS).open("rb")
    except FileNotFoundError:
        return RankHistory()
    with file:
        for number, text in enumerate(iter(partial(file.readline, _LONGEST_LINE), b"")):
            if number % stride and text.endswith(b"}\n"):
                continue
            interval = _interval(text)
            if interval is None:
                damaged += text.endswith(b"\n")
                continue
            kept[interval.step] = interval
            columns += len(interval.ranks)
            if len(kept) > _MOST_INTERVALS or columns > _MOST_COLUMNS:
                stride *= 2
                kept = dict(list(kept.items())[::2])
                columns = sum(len(interval.ranks) for interval in kept.values())
    return RankHistory(tuple(kept[step] for step in sorted(kept)), damaged)


def _interval(text: bytes) -> Interval | None:
    try:
        record: dict[str, Any] = json.loads(text)
        step, ranks = int(record["step"]), tuple(int(rank) for rank in record["ranks"])
        size = len(ranks)
        if not (0 <= step < 2**53 and size > 0 and 0 <= min(ranks) <= max(ranks) < _MOST_RANKS):
            return None
        return Interval(
            step,
            as_number(record.get("seconds")),
            ranks,
            _column(record["updates"], size),
            _column(record["step_seconds"], size),
            {str(name): _column(column, size) for name, column in record["split"].items()},
            {str(name): _column(column, size) for name, column in record["gauges"].items()},
            tuple(
                Straggler(int(each["rank"]), str(each.get("host", "")), float(each["ratio"]), str(each["phase"]))
                for each in record["stragglers"]
            ),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _column(values: Any, size: int) -> Numbers:
    if not isinstance(values, list) or len(values) != size:
        raise ValueError("a column has a value for each rank")
    return np.array([as_number(value) for value in values])


def _over_ranks(columns: Sequence[Numbers | None]) -> Numbers:
    """Return min, mean and max over ranks of each interval's column, [interval, 3]; NaN where no rank has a value."""
    rows = np.full((len(columns), 3), np.nan)
    for row, column in enumerate(columns):
        known = column[np.isfinite(column)] if column is not None else np.empty(0)
        if len(known):
            rows[row] = known.min(), known.mean(), known.max()
    return rows
