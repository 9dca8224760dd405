"""Charts of the ranks: a heat map of their updates, the time of an update as stacked areas, memory, use of GPUs.

rank 0  ░░░░░░░▒▒▒░░░░     a row each rank, or each group of ranks; the darker, the slower
     1  ▓▓▓▓▓▓▓███▓▓▓▓     a column each stretch of steps
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from lockstep.core import formatting
from lockstep.report.charts import BOTTOM, STRETCH, TOP, Chart, Marks, mark_lines, restart_lines, rollback_bands
from lockstep.report.html import render
from lockstep.report.rank_data import RankData
from lockstep.report.scales import fitted, step_ticks, tick_labels, ticks
from lockstep.report.series import Numbers, Series

_ROWS, _COLUMNS = 32, 100  # of a heat map, at most
_LEVELS = 6
_ROW_PIXELS = 14
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

    @property
    def height(self) -> int:
        return self.plot_height + TOP + BOTTOM

    def along(self, steps: Numbers) -> Numbers:
        """Return 0 for the left edge, 1 for the right."""
        return (steps - self.first) / max(1, self.last - self.first)


def filled_charts(data: RankData, first: int, last: int, marks: Marks) -> list[FilledChart]:
    """Return the heat map of the ranks, and the areas of the phases, as far as there are numbers."""
    charts = [_heat_map(data, first, last, marks), _areas(data, first, last, marks)]
    return [chart for chart in charts if chart is not None]


def gauge_charts(data: RankData, first: int, last: int, marks: Marks) -> list[Chart]:
    """Return charts of memory and of the use of GPUs: min, mean and max over ranks."""
    charts = []
    for title, names, unit in (("Memory by rank", _MEMORY, "bytes"), ("Use of GPUs, %", _UTILIZATION, "")):
        name = next((name for name in names if name in data.gauges and np.isfinite(data.gauges[name]).any()), None)
        if name is None:
            continue
        values, size = data.gauges[name], ""
        if unit == "bytes":
            size, factor = ("GiB", 2.0**30) if np.nanmax(values) >= 2.0**30 else ("MiB", 2.0**20)
            values = values / factor
        series = [
            Series(label, data.steps, values[:, column], color=color)
            for label, column, color in (("max", 2, 1), ("mean", 1, 0), ("min", 0, 2))
        ]
        finding = f"Most: {formatting.short(float(np.nanmax(values)))} {size}".rstrip() + f" ({name.replace('_', ' ')})"
        scale = fitted(values[np.isfinite(values)], from_zero=True)
        charts.append(Chart(title + (f", {size}" if size else ""), finding, series, scale, first, last, marks))
    return charts


def straggler_rows(data: RankData) -> list[list[str]]:
    """Return the rows of a table of the ranks that others waited for, the head first; empty if there are none."""
    rows = [
        [str(rank), host, f"{number:,} of {len(data.steps):,}", phase]
        for rank, (host, number, phase) in list(data.stragglers.items())[:_MOST_STRAGGLERS]
    ]
    return [["Rank", "host", "intervals", "phase"], *rows] if rows else []


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


def _heat_map(data: RankData, first: int, last: int, marks: Marks) -> FilledChart | None:
    known = data.seconds[np.isfinite(data.seconds)]
    if data.seconds.shape[1] < 2 or not len(known):
        return None
    cells = _cells(data, first, last)
    groups = [group for group in np.array_split(np.arange(cells.shape[1]), min(_ROWS, cells.shape[1])) if len(group)]
    low, high = np.percentile(known, [2, 98])
    bounds = np.linspace(low, max(high, low * 1.02), _LEVELS + 1)[1:-1]
    paths: list[list[str]] = [[] for _ in range(_LEVELS)]
    width = STRETCH / len(cells)
    for row, group in enumerate(groups):
        values = _largest(cells[:, group])
        for column in np.flatnonzero(np.isfinite(values)):
            level = int(np.searchsorted(bounds, values[column], side="right"))
            top, bottom = row * _ROW_PIXELS, (row + 1) * _ROW_PIXELS - 1
            left, right = column * width, (column + 1) * width
            paths[level].append(f"M{left:.1f} {top}H{right:.1f}V{bottom}H{left:.1f}z")
    means = np.array([np.nanmean(column) if np.isfinite(column).any() else np.nan for column in data.seconds.T])
    slowest, usual = int(np.nanargmax(means)), float(np.nanmedian(means))
    finding = f"Slowest: rank {slowest}, {_time(means[slowest])} a step; median rank {_time(usual)}"
    every = max(1, len(groups) // 8)
    labels = [
        ((row + 0.5) * _ROW_PIXELS, str(group[0]) if len(group) == 1 else f"{group[0]}-{group[-1]}")
        for row, group in enumerate(groups)
        if row % every == 0
    ]
    limits = [low, *bounds, max(high, low * 1.02)]
    legend = [(f"h{level}", _time(limits[level])) for level in range(_LEVELS)]
    is_grouped = len(groups) < cells.shape[1]
    note = "A row has a group of ranks, with the slowest of them." if is_grouped else "A row has a rank."
    return FilledChart(
        "Time of an update by rank",
        finding,
        len(groups) * _ROW_PIXELS,
        first,
        last,
        [(f"h{level}", "".join(path)) for level, path in enumerate(paths) if path],
        labels,
        legend,
        f"{note} A column has a stretch of steps; it is empty where nothing was measured.",
        marks,
    )


def _cells(data: RankData, first: int, last: int) -> Numbers:
    """Return the mean seconds of each stretch of steps, [column, rank]: an interval covers the steps since the last."""
    columns = max(1, min(_COLUMNS, last - first))
    edges = np.linspace(first, last, columns + 1)
    starts = np.concatenate([[first], data.steps[:-1]])
    cells = np.full((columns, data.seconds.shape[1]), np.nan)
    for column in range(columns):
        inside = (data.steps > edges[column]) & (starts < edges[column + 1])
        if inside.any():
            part = data.seconds[inside]
            counts = np.isfinite(part).sum(axis=0)
            cells[column] = np.where(counts > 0, np.nansum(part, axis=0) / np.maximum(1, counts), np.nan)
    return cells


def _largest(values: Numbers) -> Numbers:
    """Return the largest of each row; NaN where none is known."""
    largest = np.where(np.isfinite(values), values, -np.inf).max(axis=1)
    return np.where(np.isfinite(largest), largest, np.nan)


# --- areas ----------------------------------------------------------------------------------------------------------

_AREA_HEIGHT = 180


def _areas(data: RankData, first: int, last: int, marks: Marks) -> FilledChart | None:
    names = [*(name for name in _PHASES if name in data.split), *(name for name in data.split if name not in _PHASES)]
    if not names:
        return None
    parts = np.array([np.nan_to_num(data.split[name][:, 0]) for name in names])
    known = parts.sum(axis=0) > 0
    if not known.any():
        return None
    parts, steps = parts[:, known], data.steps[known]
    tops = np.cumsum(parts, axis=0) * 1000  # ms
    scale = fitted(tops[-1], from_zero=True)
    kept = np.unique(np.linspace(0, len(steps) - 1, min(400, len(steps))).round().astype(int))
    along = np.clip((steps[kept] - first) / max(1, last - first), 0, 1) * STRETCH
    along = np.concatenate([[max(0.0, 2 * along[0] - along[min(1, len(along) - 1)])], along])  # the first interval
    fills = []
    floor = np.zeros(len(along))
    for number, top in enumerate(tops):
        heights = scale.heights(np.concatenate([[top[kept][0]], top[kept]]))
        upper = [f"{x:.1f} {(1 - y) * _AREA_HEIGHT:.1f}" for x, y in zip(along, heights, strict=True)]
        lower = [f"{x:.1f} {(1 - y) * _AREA_HEIGHT:.1f}" for x, y in zip(along, floor, strict=True)]
        fills.append((f"a{number % 7}", f"M{'L'.join([*upper, *reversed(lower)])}z"))
        floor = heights
    values = ticks(scale)
    places = ((1 - scale.heights(np.array(values))) * _AREA_HEIGHT).tolist()
    shares = parts.sum(axis=1) / parts.sum()
    largest = int(shares.argmax())
    return FilledChart(
        "Time of an update by phase, ms",
        f"Mostly {names[largest]}: {100 * shares[largest]:.0f} %",
        _AREA_HEIGHT,
        first,
        last,
        fills,
        list(zip(places, tick_labels(values, "plain"), strict=True)),
        [
            (f"a{number % 7}", f"{name} {100 * share:.0f} %")
            for number, (name, share) in enumerate(zip(names, shares, strict=True))
        ],
        "Mean over ranks, stacked.",
        marks,
    )


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else formatting.duration(float(seconds))
