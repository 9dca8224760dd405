"""Reads ranks.jsonl: the times and gauges of a run's ranks, interval by interval.

    {"step": 120, "ranks": [0, 1], "step_seconds": [0.05, 0.06], ...}   -->   Interval, whose columns are by rank

Lines that are torn, damaged or of another shape are counted, and left out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.monitor.meter_files import RANKS

_MOST_LINES = 20_000
_MOST_RANKS = 16_384

Column = tuple[float, ...]
"""A number for each rank; NaN where it isn't known."""


@dataclass(frozen=True, slots=True)
class Interval:
    """The times of all ranks in one interval.

    Attributes:
        step: At its end.
        time: Unix time at its end; NaN if it isn't known.
        seconds: Its length.
        ranks: Their numbers.
        updates: Timed updates of each rank.
        step_seconds: Mean of each rank's updates.
        slowest: 95th percentile of each rank's updates.
        split: Seconds of an update, by phase and rank.
        gauges: Values by name and rank.
        stragglers: (rank, ratio, phase) of the ranks that the others waited for.
    """

    step: int
    time: float
    seconds: float
    ranks: tuple[int, ...]
    updates: Column
    step_seconds: Column
    slowest: Column
    split: Mapping[str, Column] = field(default_factory=dict)
    gauges: Mapping[str, Column] = field(default_factory=dict)
    stragglers: tuple[tuple[int, float, str], ...] = ()


@dataclass(frozen=True, slots=True)
class RankHistory:
    """All intervals of a run.

    Attributes:
        damaged: Number of lines that could not be read.
    """

    intervals: tuple[Interval, ...] = ()
    damaged: int = 0

    def split(self) -> dict[str, float]:
        """Return the mean seconds of an update by phase, over all ranks and intervals, weighted by updates."""
        sums: dict[str, float] = {}
        weight = 0.0
        for interval in self.intervals:
            for index, updates in enumerate(interval.updates):
                parts = {name: column[index] for name, column in interval.split.items()}
                if updates > 0 and parts and all(map(math.isfinite, parts.values())):
                    weight += updates
                    for name, seconds in parts.items():
                        sums[name] = sums.get(name, 0.0) + updates * seconds
        return {name: seconds / weight for name, seconds in sums.items()} if weight else {}

    def peak(self, gauge: str) -> tuple[float, int] | None:
        """Return the largest value of a gauge and its rank; None if no rank has it."""
        known = [
            (value, rank)
            for interval in self.intervals
            for value, rank in zip(interval.gauges.get(gauge, ()), interval.ranks, strict=False)
            if math.isfinite(value)
        ]
        return max(known, default=None)


def read_rank_history(run: Path) -> RankHistory:
    """Return what a run's ranks.jsonl has, the newest 20,000 lines; nothing if there is none. Raises OSError."""
    try:
        lines = (run / RANKS).read_bytes().splitlines()[-_MOST_LINES:]
    except FileNotFoundError:
        return RankHistory()
    intervals = [interval for text in lines if (interval := _interval(text)) is not None]
    return RankHistory(tuple(intervals), len(lines) - len(intervals))


def _interval(text: bytes) -> Interval | None:
    try:
        record: dict[str, Any] = json.loads(text)
        ranks = tuple(int(rank) for rank in record["ranks"])
        size = len(ranks)
        if not 0 < size <= _MOST_RANKS:
            return None
        return Interval(
            int(record["step"]),
            _number(record.get("time")),
            _number(record.get("seconds")),
            ranks,
            _column(record["updates"], size),
            _column(record["step_seconds"], size),
            _column(record["slowest"], size),
            {str(name): _column(column, size) for name, column in record["split"].items()},
            {str(name): _column(column, size) for name, column in record["gauges"].items()},
            tuple((int(each["rank"]), float(each["ratio"]), str(each["phase"])) for each in record["stragglers"]),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _column(values: Any, size: int) -> Column:
    if not isinstance(values, list) or len(values) != size:
        raise ValueError("a column has a value for each rank")
    return tuple(map(_number, values))


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else math.nan
