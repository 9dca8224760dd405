"""A comparison of runs as one page.

compare --> a chart for each metric: a line each run, in the color of its group; mean and deviation over seeds
        --> compare.html, which extends page.html --> one file, written atomically
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from lockstep import __version__
from lockstep.core import formatting
from lockstep.core.errors import RunFailed
from lockstep.core.files import write_atomically
from lockstep.report import facts
from lockstep.report.charts import Band, Chart, color_class, draw
from lockstep.report.comparison import ComparedRun, RunGroup, SideBySide, metrics_of
from lockstep.report.curves import capitalized, throughput, unit_of
from lockstep.report.html import render
from lockstep.report.run_data import RunData
from lockstep.report.scales import Unit, fitted, value_text
from lockstep.report.series import Series, running_median

PAGE = "compare.html"

_MOST_LOGGED = 12  # charts of what users logged
_NAMED_RUNS, _LONGEST_HEADING = 4, 80
_GRID = 400  # places at which a mean over seeds is known


def write_comparison(comparison: SideBySide, output: Path | None = None) -> Path:
    """Write the page into `output`, compare.html by default, and return its path. Raises RunFailed."""
    target = Path(os.path.abspath(output or PAGE))
    try:
        write_atomically(target, compose_comparison(comparison))
    except OSError as error:
        raise RunFailed(f"can't write {target}: {error.strerror or error}") from error
    return target


def compose_comparison(comparison: SideBySide) -> str:
    """Return the page."""
    runs, styles = comparison.runs, _styles(comparison)
    drawn = comparison_charts(comparison)
    names = formatting.listed([run.label for run in runs], _NAMED_RUNS)
    groups = f", {len(comparison.groups)} configs" if comparison.has_seeds else ""
    now = facts.date(time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    return render(
        "compare.html",
        title=f"{names}: comparison of runs",
        kicker="Comparison of runs",
        heading=names if len(names) <= _LONGEST_HEADING else f"{len(runs)} runs",
        standfirst="",
        state=f"{len(runs)} runs{groups}",
        byline="",
        flaws=list(_flaws(comparison)),
        figures=[],
        runs=[_row(run, color_class(styles[run.label])) for run in runs],
        charts=drawn,
        draw=draw,
        draw_filled=None,
        has_gap=any(not series.finite.all() for chart in drawn for series in chart.series),
        has_restarts=any(kind == "restarted" for chart in drawn for kind, _, _ in chart.points),
        has_rollbacks=any(kind == "back" for chart in drawn for kind, _, _ in chart.points),
        final=comparison.figure_rows(),
        seeds=comparison.seed_rows(),
        differences=comparison.difference_rows(),
        footer=f"Made by Lockstep {__version__} on {now}.",
    )


def comparison_charts(comparison: SideBySide) -> list[Chart]:
    """Return a chart for each metric that two runs have, the loss first."""
    found_in = [metrics_of(run.data) for run in comparison.runs]
    kinds = {name: kind for metrics in found_in for name, kind in metrics.items()}
    shared = [name for name in kinds if sum(name in metrics for metrics in found_in) > 1]
    logged = [name for name in shared if kinds[name] == "logged"]
    drawn = []
    for name in [*(name for name in shared if kinds[name] != "logged"), *logged[:_MOST_LOGGED]]:
        title = "Training loss" if kinds[name] == "loss" else capitalized(name)
        series = {run.label: _metric(run.data, name, kinds[name]) for run in comparison.runs}
        drawn.append(_chart(comparison, title, series, unit_of(name)))
    for title, column in (("Gradient norm", "grad_norm"), ("Learning rate", "lr")):
        series = {run.label: replace(run.data.columns[column], noisy=True) for run in comparison.runs}
        drawn.append(_chart(comparison, title, series, "plain"))
    speeds = {run.label: throughput(run.data) for run in comparison.runs}
    unit = "tokens" if all(series.name == "tokens" for series in speeds.values()) else "samples"
    speeds = {run.label: _speed(run.data, unit) for run in comparison.runs}
    drawn.append(_chart(comparison, f"{capitalized(unit)} per second", speeds, "rate", from_zero=True))
    charts = [chart for chart in drawn if chart is not None]
    edges = [(int(s.known_steps[0]), int(s.known_steps[-1])) for chart in charts for s in chart.series]
    first, last = min((low for low, _ in edges), default=0), max((high for _, high in edges), default=1)
    first = 0 if first < 0.5 * last or first == last else first
    return [replace(chart, first=first, last=last, is_large=number == 0) for number, chart in enumerate(charts)]


def _styles(comparison: SideBySide) -> dict[str, Series]:
    """Return an empty series with color and dash by label: runs of a group share the color, and differ in the dash.

    Alone in its group, a run has the dash of its color, so that no color stands for itself. A mean is solid.
    """
    nothing = np.empty(0)
    return {
        run.label: Series(
            run.label,
            nothing,
            nothing,
            color=number,
            dash=number + number // 6 if len(group.runs) == 1 else 1 + member + number // 6,
        )
        for number, group in enumerate(comparison.groups)
        for member, run in enumerate(group.runs)
    }


def _metric(run: RunData, name: str, kind: str) -> Series:
    if kind == "loss":
        return replace(run.columns["loss"], noisy=True)
    values = run.logged.get(name, {})
    if kind == "evaluation":
        values = next(
            (
                metrics[metric]
                for of, metrics in run.evaluations.items()
                for metric in metrics
                if f"{of} {metric}" == name
            ),
            {},
        )
    return Series.of(name, values, values.values(), noisy=kind == "logged")


def _speed(run: RunData, unit: str) -> Series:
    column = run.columns[f"{unit}_per_second"]
    known = ~(column.values <= 0)  # 0: nothing was measured yet
    return Series(unit, column.steps[known], column.values[known], noisy=True)


def _chart(
    comparison: SideBySide, title: str, of_runs: dict[str, Series], unit: Unit, *, from_zero: bool = False
) -> Chart | None:
    """Return a chart of the runs that have a finite value; None if fewer than two have."""
    styles = _styles(comparison)
    known = {label: series for label, series in of_runs.items() if series.finite.any()}
    if len(known) < 2:
        return None
    smooth = {
        label: replace(_smoothed(series), name=label, noisy=False, color=styles[label].color, dash=styles[label].dash)
        for label, series in known.items()
    }
    bands = [
        band
        for group in comparison.groups
        if (band := _band(group, [smooth[r.label] for r in group.runs if r.label in smooth]))
    ]
    series = [*(band.series for band in bands), *smooth.values()]
    values = np.concatenate([each.known for each in series])
    edges = np.concatenate([np.empty(0), *(edge for band in bands for edge in (band.low, band.high))])
    low, high = (0.0 if values.min() >= 0 else -np.inf), (1.0 if unit == "percent" and values.max() <= 1 else np.inf)
    scale = fitted(
        np.concatenate(
            [values, np.clip(edges, low, high)]
        ),  # no axis ends below zero, or above 100 %, for a band's sake
        from_zero=from_zero,
        may_be_logarithmic=not from_zero and not bands,
        most=high,
    )
    missing = [run.label for run in comparison.runs if run.label not in known]
    remarks = [
        *(["Running medians."] if any(each.is_smoothed for each in known.values()) else []),
        *(["Bands: mean ± deviation over seeds, where all of them have values."] if bands else []),
        *([f"No finite value: {formatting.listed(missing, 5)}."] if missing else []),
    ]
    points = [point for run in comparison.runs if run.label in smooth for point in _points(run, smooth[run.label])]
    return Chart(
        title, _finding(smooth, unit), series, scale, 0, 1, unit=unit, bands=bands, points=points, remarks=remarks
    )


def _smoothed(series: Series) -> Series:
    """Return the running median of noisy values, with their gaps; others as they are."""
    if not series.is_smoothed:
        return series
    median, gaps = running_median(series), series.steps[~series.finite]
    steps, values = np.concatenate([median.steps, gaps]), np.concatenate([median.values, np.full(len(gaps), np.nan)])
    return Series.of(series.name, steps, values)


def _band(group: RunGroup, members: Sequence[Series]) -> Band | None:
    """Return mean and deviation where all members have values; None for one, or if there is no such step."""
    if len(members) < 2:
        return None
    first, last = max(s.known_steps[0] for s in members), min(s.known_steps[-1] for s in members)
    steps = np.unique(np.concatenate([s.known_steps for s in members]))
    steps = steps[(first <= steps) & (steps <= last)]
    if not len(steps):
        return None
    steps = steps[np.unique(np.linspace(0, len(steps) - 1, min(_GRID, len(steps))).round().astype(int))]
    values = np.array([np.interp(steps, s.known_steps, s.known) for s in members])
    mean, deviation = values.mean(axis=0), values.std(axis=0, ddof=1)
    name = f"mean of {len(members)}" + ("" if group.name == "all runs" else f", {group.name}")
    return Band(Series(name, steps, mean, color=members[0].color, dash=0), mean - deviation, mean + deviation)


def _points(run: ComparedRun, series: Series) -> Iterator[tuple[str, int, Series]]:
    rolled_back = {first for first, _ in run.data.rollbacks}
    for step in sorted({step for step, _ in run.data.restarts} | rolled_back):
        yield ("back" if step in rolled_back else "restarted"), step, series


def _finding(series: dict[str, Series], unit: Unit) -> str:
    last = {label: float(each.known[-1]) for label, each in series.items()}
    low, high = min(last, key=lambda label: last[label]), max(last, key=lambda label: last[label])
    if last[low] == last[high]:
        return f"At the end {value_text(last[low], unit)} in all runs"
    ends = [f"{value_text(last[label], unit)} ({label})" for label in (low, high)]
    return f"At the end from {ends[0]} to {ends[1]}"


def _row(run: ComparedRun, style: str) -> tuple[str, list[str], str]:
    """Return style, cells and path of a run in the table of runs."""
    restarts = [f"{step:,}" for step, _ in run.data.restarts[:5]]
    more = ", ..." if len(run.data.restarts) > len(restarts) else ""
    rollbacks = [f"{last:,} to {first:,}" for first, last in run.data.rollbacks[:5]]
    steps = run.data.columns["loss"].steps
    cells = [
        run.label,
        run.state,
        f"{steps[-1]:,.0f}" if len(steps) else "",
        f"at {', '.join(restarts)}{more}" if restarts else "",
        f"from {', '.join(rollbacks)}" if rollbacks else "",
    ]
    return style, cells, run.place


def _flaws(comparison: SideBySide) -> Iterator[str]:
    for run in comparison.runs:
        for flaw in run.data.flaws:
            yield f"{run.label}: {flaw}"
        if run.ranks.damaged:
            yield f"{run.label}: {run.ranks.damaged:,} lines of ranks.jsonl can't be read."
        if not run.data.last:
            yield f"{run.label}: no update is recorded."
    alone = [run.label for run in comparison.runs if not run.settings]
    if alone:
        yield f"Without a readable config, nothing is known of how these differ: {formatting.listed(alone, 5)}."
