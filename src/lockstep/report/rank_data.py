"""Reads ranks.jsonl, the meters of all ranks, for a report.

    a line each interval: columns by rank  -->  step seconds [interval, rank], split and gauges over ranks, stragglers

Of a long run each 1/400 has the intervals that began in it, averaged, so a page stays small.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.monitor.meter_files import RANKS
from lockstep.report.series import Numbers

_LONGEST_LINE = 1 << 24
_MOST_INTERVALS = 20_000
_MOST_RANKS = 1 << 14


@dataclass(frozen=True, slots=True)
class RankData:
    """The meters of a run, by interval.

    Attributes:
        steps: Of the run at the end of each interval, ascending.
        seconds: Mean seconds of an update, by interval and rank; NaN where a rank measured none.
        split: Phase --> mean over ranks of its seconds in an update, by interval.
        gauges: Name --> min, mean and max over ranks, by interval.
        stragglers: Rank --> host, number of intervals in which the others waited for it, and the phase most often.
        damaged: Lines that can't be read.
    """

    steps: Numbers
    seconds: Numbers
    split: Mapping[str, Numbers]
    gauges: Mapping[str, Numbers]
    stragglers: Mapping[int, tuple[str, int, str]]
    damaged: int


def read_ranks(folder: Path) -> RankData | None:
    """Return the meters of a run; None if it has none. Raises OSError if the system refuses to read them."""
    records, damaged = _records(folder / RANKS)
    if not records:
        return None
    ranks = 1 + max((rank for _, numbers, _ in records for rank in numbers), default=0)
    seconds = np.full((len(records), ranks), np.nan)
    for row, (_, numbers, _) in enumerate(records):
        for rank, value in numbers.items():
            seconds[row, rank] = value
    stragglers = _stragglers([record for _, _, record in records])
    return RankData(
        np.array([float(step) for step, _, _ in records]),
        seconds,
        _columns([_table(record, "split") for _, _, record in records], lambda values: [float(np.mean(values))]),
        _columns(
            [_table(record, "gauges") for _, _, record in records],
            lambda values: [float(np.min(values)), float(np.mean(values)), float(np.max(values))],
        ),
        stragglers,
        damaged,
    )


def _records(file: Path) -> tuple[list[tuple[int, dict[int, float], Mapping[str, Any]]], int]:
    """Return step, seconds by rank and content of each line, by step, and the number of damaged lines."""
    records: dict[int, tuple[int, dict[int, float], Mapping[str, Any]]] = {}
    damaged = 0
    try:
        lines = file.open(encoding="utf-8", errors="replace", newline="\n")
    except FileNotFoundError:
        return [], 0
    with lines:
        for line in iter(partial(lines.readline, _LONGEST_LINE), ""):
            try:
                record = json.loads(line)
                step = int(record["step"])
                pairs = zip(record["ranks"], record["step_seconds"], strict=True)
                numbers = {int(rank): _number(value) for rank, value in pairs}
                if not (0 <= step < 2**53 and numbers and 0 <= min(numbers) <= max(numbers) < _MOST_RANKS):
                    raise ValueError
            except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
                damaged += 1
                continue
            records[step] = (step, numbers, record)
    kept = sorted(records.values(), key=lambda record: record[0])
    return kept[:: 1 + len(kept) // _MOST_INTERVALS], damaged


def _table(record: Mapping[str, Any], name: str) -> dict[str, list[float]]:
    table = record.get(name)
    columns = table.items() if isinstance(table, dict) else ()
    return {
        str(key): [number for number in map(_number, column) if math.isfinite(number)]
        for key, column in columns
        if isinstance(column, list)
    }


def _columns(tables: list[dict[str, list[float]]], reduce: Any) -> dict[str, Numbers]:
    """Return each column reduced over ranks, [interval, value]; NaN where there is none."""
    names = dict.fromkeys(name for table in tables for name in table)
    columns = {}
    for name in names:
        rows = [reduce(table[name]) if table.get(name) else None for table in tables]
        width = next((len(row) for row in rows if row is not None), 0)
        if width:
            columns[name] = np.array([row if row is not None else [math.nan] * width for row in rows])
    return columns


def _stragglers(records: list[Mapping[str, Any]]) -> dict[int, tuple[str, int, str]]:
    hosts: dict[int, str] = {}
    phases: dict[int, Counter[str]] = {}
    for record in records:
        items = record.get("stragglers")
        for item in items if isinstance(items, list) else ():
            if isinstance(item, dict) and isinstance(rank := item.get("rank"), int):
                hosts[rank] = str(item.get("host", ""))
                phases.setdefault(rank, Counter())[str(item.get("phase", ""))] += 1
    most = sorted(phases, key=lambda rank: -phases[rank].total())
    return {rank: (hosts[rank], phases[rank].total(), phases[rank].most_common(1)[0][0]) for rank in most}


def _number(value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18
    return float(value) if is_number and isinstance(value, int | float) else math.nan
