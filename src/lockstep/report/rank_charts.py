"""Charts of the ranks: a heat map of their updates, the time of an update as stacked areas, memory, use of GPUs.

rank 0  ░░░░░░░▒▒▒░░░░     a row each rank, or each group of ranks; the stronger, the slower
     1  ▓▓▓▓▓▓▓███▓▓▓▓     a column each stretch of steps
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from lockstep.core import formatting
from lockstep.report.charts import BOTTOM, STRETCH, TOP, Chart, Marks, mark_lines, restart_lines, rollback_bands
from lockstep.report.html import render
from lockstep.report.rank_history import RankHistory
from lockstep.report.scales import fitted, step_ticks, tick_labels, ticks, value_text
from lockstep.report.series import Numbers, Series

_ROWS, _COLUMNS = 32, 100  # of a heat map, at most
_LEVELS = 6
_ROW_PIXELS, _WIDE_ROW_PIXELS, _WIDE_ROWS = 14, 26, 10
_PHASES = ("forward", "backward", "optimizer", "communication", "data", "save", "host")
_MEMORY = ("memory_allocated_peak", "memory_reserved", "memory_allocated", "memory_resident")
_UTILIZATION = ("gpu_utilization", "utilization")
_MOST_STRAGGLERS = 12


@dataclass(frozen=True, slots=True)
class FilledChart:
    """A chart of filled shapes instead of lines.

    Attributes:
        title, finding: As of `Chart`.
        fills: CSS class and path of each color, in a frame of 1000 units x `plot_height` pixels.
        labels: Pixels below the upper edge of the plot, and text, for the vertical axis.
        legend: CSS class and text of each color.
        note: How it is drawn.
        rows: The same as a table, the head first, for those who can't see it.
    """

    title: str
    finding: str
    plot_height: int
    first: int
    last: int
    fills: Sequence[tuple[str, str]]
    labels: Sequence[tuple[float, str]]
    legend: Sequence[tuple[str, str]]
    note: str = ""
    marks: Marks = field(default_factory=Marks)
    rows: Sequence[Sequence[str]] = ()

    @property
    def height(self) -> int:
        return self.plot_height + TOP + BOTTOM

    def along(self, steps: Numbers) -> Numbers:
        """Return 0 for the left edge, 1 for the right."""
        return (steps - self.first) / max(1, self.last - self.first)


def filled_charts(ranks: RankHistory, first: int, last: int, marks: Marks) -> list[FilledChart]:
    """Return the heat map of the ranks, and the areas of the phases, as far as there are numbers."""
    charts = [_heat_map(ranks, first, last, marks), _areas(ranks, first, last, marks)]
    return [chart for chart in charts if chart is not None]


def gauge_charts(ranks: RankHistory, first: int, last: int, marks: Marks) -> list[Chart]:
    """Return charts of memory and of the use of GPUs: min, mean and max over ranks."""
    charts = []
    for title, names, unit in (("Memory by rank", _MEMORY, "bytes"), ("Use of GPUs, %", _UTILIZATION, "")):
        name, values = next(
            ((name, values) for name in names if (values := ranks.gauge(name)) is not None), ("", np.empty((0, 3)))
        )
        if not name:
            continue
        size = ""
        if unit == "bytes":
            size, factor = ("GiB", 2.0**30) if np.nanmax(values) >= 2.0**30 else ("MiB", 2.0**20)
            values = values / factor
        is_alone = all(len(interval.ranks) < 2 for interval in ranks.intervals)
        columns = [("rank 0", 1, 0)] if is_alone else [("max", 2, 1), ("mean", 1, 0), ("min", 0, 2)]
        series = [Series(label, ranks.steps, values[:, column], color=color) for label, column, color in columns]
        finding = f"Most: {formatting.short(float(np.nanmax(values)))} {size}".rstrip() + f" ({name.replace('_', ' ')})"
        scale = fitted(values[np.isfinite(values)], from_zero=True)
        charts.append(Chart(title + (f", {size}" if size else ""), finding, series, scale, first, last, marks))
    return charts


def straggler_rows(ranks: RankHistory) -> list[list[str]]:
    """Return the rows of a table of the ranks that others waited for, the head first; empty if there are none."""
    rows = [
        [str(each.rank), each.host, f"{each.intervals:,} of {len(ranks.intervals):,}", f"{each.ratio:.1f}x", each.phase]
        for each in ranks.stragglers()[:_MOST_STRAGGLERS]
    ]
    return [["Rank", "host", "intervals", "time", "phase"], *rows] if rows else []


def draw_filled(chart: FilledChart) -> str:
    """Return the svg."""
    steps = step_ticks(chart.first, chart.last)
    places = chart.along(np.array(steps, dtype=float))
    return render(
        "filled.html",
        chart=chart,
        top=TOP,
        bottom=chart.height - BOTTOM,
        stretch=STRETCH,
        step_labels=[
            (f"{100 * place:.2f}%", label) for place, label in zip(places, tick_labels(steps, "plain"), strict=True)
        ],
        marks=mark_lines(chart),
        restarts=restart_lines(chart),
        rollbacks=rollback_bands(chart),
    )


# --- heat map -------------------------------------------------------------------------------------------------------


def _heat_map(ranks: RankHistory, first: int, last: int, marks: Marks) -> FilledChart | None:
    numbers = sorted({rank for interval in ranks.intervals for rank in interval.ranks})
    is_split = any(interval.split for interval in ranks.intervals)  # else the waiting can't be left out
    columns = [interval.computing if is_split else np.array(interval.step_seconds) for interval in ranks.intervals]
    known = np.concatenate([np.empty(0), *columns])
    known = known[np.isfinite(known)]
    if len(numbers) < 2 or not len(known):
        return None
    means, cells = _mean_seconds(ranks, columns, numbers, (first, last))
    groups = np.array_split(np.arange(len(numbers)), min(_ROWS, len(numbers)))
    low, high = np.percentile(known, [2, 98])
    limits = np.linspace(low, max(high, low * 1.02), _LEVELS + 1)
    slowest, finite = int(np.nanargmax(means)), np.sort(means[np.isfinite(means)])
    usual = finite[(len(finite) - 1) // 2]
    pixels = _ROW_PIXELS if len(groups) > _WIDE_ROWS else _WIDE_ROW_PIXELS
    is_grouped = len(groups) < len(numbers)
    note = "A row has a group of ranks, with the slowest of them." if is_grouped else "A row has a rank."
    every = max(1, len(groups) // 8)
    names = [_span_text(numbers[group[0]], numbers[group[-1]]) for group in groups]
    return FilledChart(
        "Time of an update by rank, without waiting for others" if is_split else "Time of an update by rank",
        f"Slowest: rank {numbers[slowest]}, {_time(means[slowest])} an update; median rank {_time(usual)}",
        len(groups) * pixels,
        first,
        last,
        _cell_paths([_largest(cells[:, group]) for group in groups], limits, pixels),
        [((row + 0.5) * pixels, name) for row, name in enumerate(names) if row % every == 0],
        [(f"h{level}", f"from {_time(limits[level])}") for level in range(_LEVELS)],
        f"{note} A column has a stretch of steps; it is empty where nothing was measured.",
        marks,
        [
            ["Ranks", "mean of an update", "slowest rank", "its mean"],
            *(
                [name, _time(float(np.nanmean(of_group))), str(numbers[group[worst]]), _time(of_group[worst])]
                for name, group in zip(names, groups, strict=True)
                if np.isfinite(of_group := means[group]).any()
                for worst in (int(np.nanargmax(of_group)),)
            ),
        ],
    )


def _mean_seconds(
    ranks: RankHistory, seconds_of: Sequence[Numbers], numbers: Sequence[int], span: tuple[int, int]
) -> tuple[Numbers, Numbers]:
    """Return the mean seconds of an update, [rank], and in each stretch of steps, [column, rank].

    An interval covers the steps since the one before.
    """
    first, last = span
    columns = max(1, min(_COLUMNS, last - first))
    place = {rank: index for index, rank in enumerate(numbers)}
    sums, counts = (np.zeros((columns, len(numbers))) for _ in range(2))
    total, number = (np.zeros(len(numbers)) for _ in range(2))
    start = first
    for interval, seconds in zip(ranks.intervals, seconds_of, strict=True):
        left, right = ((step - first) / max(1, last - first) * columns for step in (start, interval.step))
        covered = slice(max(0, min(columns - 1, int(left))), max(1, min(columns, math.ceil(right))))
        weights = np.array(interval.updates)
        is_known = np.isfinite(seconds) & (weights > 0)
        at = np.array([place[rank] for rank in interval.ranks])[is_known]
        sums[covered, at] += seconds[is_known]
        counts[covered, at] += 1
        total[at] += (seconds * weights)[is_known]
        number[at] += weights[is_known]
        start = interval.step
    return _divided(total, number), _divided(sums, counts)


def _divided(sums: Numbers, counts: Numbers) -> Numbers:
    return np.where(counts > 0, sums / np.maximum(counts, 1e-9), np.nan)


def _cell_paths(rows: Sequence[Numbers], limits: Numbers, pixels: int) -> list[tuple[str, str]]:
    """Return class and path of each level: cells that follow one another at one level are one rectangle."""
    paths: list[list[str]] = [[] for _ in range(_LEVELS)]
    for row, values in enumerate(rows):
        levels = np.where(np.isfinite(values), np.searchsorted(limits[1:-1], values, side="right"), -1)
        edges = [0, *(np.flatnonzero(np.diff(levels)) + 1).tolist(), len(levels)]
        width, top, bottom = STRETCH / len(levels), row * pixels, (row + 1) * pixels - 1
        for start, end in pairwise(edges):
            if levels[start] >= 0:
                paths[levels[start]].append(
                    f"M{start * width:.1f} {top}H{end * width:.1f}V{bottom}H{start * width:.1f}z"
                )
    return [(f"h{level}", "".join(path)) for level, path in enumerate(paths) if path]


def _span_text(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _largest(values: Numbers) -> Numbers:
    """Return the largest of each row; NaN where none is known."""
    largest = np.where(np.isfinite(values), values, -np.inf).max(axis=1)
    return np.where(np.isfinite(largest), largest, np.nan)


# --- areas ----------------------------------------------------------------------------------------------------------

_AREA_HEIGHT, _AREA_POINTS, _TABLE_ROWS = 180, 300, 10


def _areas(ranks: RankHistory, first: int, last: int, marks: Marks) -> FilledChart | None:
    split = ranks.phases()
    names = [*(name for name in _PHASES if name in split), *(name for name in split if name not in _PHASES)]
    if not names:
        return None
    parts = np.array([np.nan_to_num(split[name]) for name in names])
    known = parts.sum(axis=0) > 0
    if not known.any():
        return None
    parts, steps = parts[:, known], ranks.steps[known]
    shares = parts.sum(axis=1) / parts.sum()
    seen = shares > 0
    names, parts, shares = [name for name, share in zip(names, seen, strict=True) if share], parts[seen], shares[seen]
    tops = np.cumsum(parts, axis=0) * 1000  # ms
    scale = fitted(tops[-1], from_zero=True)
    kept = np.unique(np.linspace(0, len(steps) - 1, min(_AREA_POINTS, len(steps))).round().astype(int))
    starts = np.concatenate([[first], steps[:-1]])[kept]  # each interval is a step as wide as what it covers
    edges = np.clip((np.stack([starts, steps[kept]], axis=1).ravel() - first) / max(1, last - first), 0, 1) * STRETCH
    heights = (1 - scale.heights(np.repeat(tops[:, kept], 2, axis=1))) * _AREA_HEIGHT
    floors = np.concatenate([np.full((1, len(edges)), float(_AREA_HEIGHT)), heights[:-1]])
    values = ticks(scale)
    places = ((1 - scale.heights(np.array(values))) * _AREA_HEIGHT).tolist()
    largest = int(shares.argmax())
    chosen = np.unique(np.linspace(0, len(steps) - 1, min(_TABLE_ROWS, len(steps))).round().astype(int))
    return FilledChart(
        "Time of an update by phase, ms",
        f"Mostly {names[largest]}: {100 * shares[largest]:.0f} %",
        _AREA_HEIGHT,
        first,
        last,
        [
            (f"a{_area_color(name)}", _band(edges, top, floor))
            for name, top, floor in zip(names, heights, floors, strict=True)
        ],
        list(zip(places, tick_labels(values, "plain"), strict=True)),
        [(f"a{_area_color(name)}", f"{name} {100 * share:.0f} %") for name, share in zip(names, shares, strict=True)],
        "Mean over ranks, stacked from the bottom in the order of the names.",
        marks,
        [
            ["Step", *(f"{name}, ms" for name in names)],
            *(
                [f"{steps[row]:,.0f}", *(value_text(1000 * value, "plain") for value in parts[:, row])]
                for row in chosen
            ),
        ],
    )


def _area_color(name: str) -> int:
    return _PHASES.index(name) if name in _PHASES else len(_PHASES) - 1


def _band(edges: Numbers, top: Numbers, floor: Numbers) -> str:
    upper = [f"{x:.1f} {y:.1f}" for x, y in zip(edges, top, strict=True)]
    lower = [f"{x:.1f} {y:.1f}" for x, y in zip(edges, floor, strict=True)]
    return f"M{'L'.join([*upper, *reversed(lower)])}z"


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else formatting.duration(float(seconds))
