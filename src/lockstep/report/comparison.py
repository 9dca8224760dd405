"""Compares runs: final figures, differences of their configs, figures over seeds, and curves.

Runs with equal configs except for seed and folder are a group, with one color and mean and deviation of its figures.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lockstep import __version__
from lockstep.core import formatting
from lockstep.core.errors import ConfigError, RunFailed
from lockstep.core.secrets import hidden_setting
from lockstep.core.terminal import plain_line
from lockstep.monitor.goodput import goodput
from lockstep.monitor.jsonl import as_number
from lockstep.report.charts import Chart, Unit, color_class, draw, value_text
from lockstep.report.curves import capitalized, median_speed, speed, throughput, unit_of, utilization
from lockstep.report.facts import as_text, date, last_evaluations
from lockstep.report.html import render, write_page
from lockstep.report.page import check_run
from lockstep.report.rank_history import RankHistory, read_rank_history
from lockstep.report.run_data import RunData, read_run
from lockstep.report.series import Series, running_median

PAGE = "compare.html"
MOST_RUNS = 64
_SEED = "run.seed"
_OWN_KEYS = (_SEED, "run.folder")  # that differ within a group
_SURROUNDINGS = ("host", "platform", "cpu", "gpus", "git", "packages")
_LONGEST_LABEL = 36
_LONGEST_VALUE = 60
_DEEPEST = 12
_COLUMNS = 100  # of a table for a file or another program
_MOST_LOGGED = 12  # charts of what users logged
_NAMED_RUNS, _LONGEST_HEADING = 4, 80
_MEMORY = ("memory_allocated_peak", "memory_resident_peak", "memory_allocated", "memory_resident")
UNKNOWN = "–"

Kind = Literal["value", "percent", "seconds", "rate", "bytes", "count"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A final figure of a run; a loss may be NaN."""

    value: float
    kind: Kind

    @property
    def text(self) -> str:
        if not math.isfinite(self.value):
            return "not finite"
        if self.kind == "seconds":
            return f"{1000 * self.value:.3g} ms" if abs(self.value) < 1 else formatting.duration(self.value)
        if self.kind == "bytes":
            return formatting.size(self.value)
        if self.kind == "count":
            return f"{self.value:,.0f}" if self.value == int(self.value) else f"{self.value:,.1f}"
        return value_text(self.value, "plain" if self.kind == "value" else self.kind)


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A run in a comparison.

    Attributes:
        label: Unique in the comparison.
        place: Its folder.
        state: What it does, such as `running`.
        settings: Its config, flat: text by dotted key; empty if it can't be read.
        figures: Those that are known, by name.
    """

    data: RunData
    ranks: RankHistory
    label: str
    place: str
    state: str
    settings: Mapping[str, str]
    figures: Mapping[str, Figure]


@dataclass(frozen=True, slots=True)
class RunGroup:
    """Runs with equal configs except for the seed and the folder.

    Attributes:
        name: The settings that differ from the other groups'.
        figures: Mean, sample deviation (NaN of a single run) and number of runs, by name.
    """

    runs: tuple[ComparedRun, ...]
    name: str
    figures: Mapping[str, tuple[Figure, Figure, int]]

    @property
    def seeds(self) -> list[str]:
        return [run.settings.get(_SEED, UNKNOWN) for run in self.runs]


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Runs beside one another; `differences` are texts by key, one a run (None: it doesn't have the key)."""

    runs: tuple[ComparedRun, ...]
    groups: tuple[RunGroup, ...]
    differences: Mapping[str, tuple[str | None, ...]]

    @property
    def has_seeds(self) -> bool:
        return len(self.groups) < len(self.runs)

    def figure_rows(self) -> list[list[str]]:
        """Return the final figures as a table, the head first."""
        names = dict.fromkeys(name for run in self.runs for name in run.figures)
        columns = [{name: figure.text for name, figure in run.figures.items()} for run in self.runs]
        return [
            ["Final", *(run.label for run in self.runs)],
            *([name, *(column.get(name, UNKNOWN) for column in columns)] for name in names),
        ]

    def difference_rows(self) -> list[list[str]]:
        """Return the differences of the configs as a table; empty if there are none."""
        rows = [
            [key, *(UNKNOWN if text is None else clipped(text, _LONGEST_VALUE) for text in texts)]
            for key, texts in self.differences.items()
        ]
        return [["Config", *(run.label for run in self.runs)], *rows] if rows else []

    def seed_rows(self) -> list[list[str]]:
        """Return the figures over seeds as a table; empty if each group is one run."""
        if not self.has_seeds:
            return []
        names = dict.fromkeys(name for group in self.groups for name in group.figures)
        return [
            ["Mean ± deviation", *(f"{group.name} (n = {len(group.runs)})" for group in self.groups)],
            ["seeds", *(clipped(", ".join(group.seeds), _LONGEST_VALUE) for group in self.groups)],
            *([name, *(_spread_text(group, name) for group in self.groups)] for name in names),
        ]


def compare(folders: Sequence[Path], states: Mapping[Path, str] | None = None) -> SideBySide:
    """Read runs and compare them.

    Args:
        states: What each run does, by its folder; by default whether it is finished.

    Raises:
        ConfigError: There are fewer than two runs, or too many, or a folder is no run's.
        RunFailed: A file can't be read.
    """
    distinct = list({os.path.realpath(folder): folder for folder in folders}.values())
    _check_number(folders, distinct)
    places = [os.path.abspath(folder) for folder in distinct]
    runs = tuple(
        _read(label, place, (states or {}).get(folder))
        for folder, label, place in zip(distinct, _labels(places), places, strict=True)
    )
    return SideBySide(runs, _groups(runs), _differences(runs))


def text(comparison: SideBySide, width: int | None) -> str:
    """Return the tables as text; runs that don't fit into `width` columns follow below.

    None: for a file or another program: nothing is cut, and a block has as many runs as fit into 100 columns.
    """
    tables = [comparison.figure_rows(), comparison.seed_rows(), comparison.difference_rows()]
    if not comparison.difference_rows():
        tables.append([["The configs are equal except for run.folder."]])
    return "\n\n".join("\n".join(_blocks(rows, width)) for rows in tables if rows)


def as_json(comparison: SideBySide) -> dict[str, Any]:
    """Return all that was compared."""
    return {
        "runs": [
            {
                "run": run.place,
                "label": run.label,
                "state": run.state,
                "group": next(number for number, group in enumerate(comparison.groups) if run in group.runs),
                "figures": {name: figure.value for name, figure in run.figures.items()},
                "restarts": [step for step, _ in run.data.restarts],
                "rollbacks": [list(steps) for steps in run.data.rollbacks],
            }
            for run in comparison.runs
        ],
        "differences": {
            key: {run.label: value for run, value in zip(comparison.runs, texts, strict=True)}
            for key, texts in comparison.differences.items()
        },
        "groups": [
            {
                "name": group.name,
                "runs": [run.label for run in group.runs],
                "seeds": group.seeds,
                "figures": {
                    name: {"mean": mean.value, "deviation": deviation.value, "n": number}
                    for name, (mean, deviation, number) in group.figures.items()
                },
            }
            for group in comparison.groups
        ],
    }


def clipped(text: str, length: int) -> str:
    """Return a text on one line, without its middle if it is longer."""
    line = plain_line(text)
    head = (length - 1) // 2
    return line if len(line) <= length else f"{line[:head]}…{line[len(line) - (length - 1 - head) :]}"


# --- reading --------------------------------------------------------------------------------------------------------


def _check_number(folders: Sequence[Path], distinct: Sequence[Path]) -> None:
    if not folders:
        raise ConfigError("there is no run to compare; name at least two runs, or a folder with runs in it")
    if len(distinct) == 1:
        same = " (named more than once)" if len(folders) > 1 else ""
        raise ConfigError(f"{distinct[0]} is a single run{same}; name at least two, or see `lockstep report`")
    if len(distinct) > MOST_RUNS:
        raise ConfigError(f"{len(distinct):,} runs are too many for one page; name at most {MOST_RUNS}")


def _metrics_of(run: RunData) -> dict[str, Series]:
    metrics = {"training loss": replace(run.columns["loss"], noisy=True)}
    for name, of_set in run.evaluations.items():
        for metric, values in of_set.items():
            metrics[f"{name} {metric}"] = Series.of(name, values, values.values())
    for name, values in run.logged.items():
        metrics.setdefault(name, Series.of(name, values, values.values(), noisy=True))
    return {name: series for name, series in metrics.items() if series.finite.any()}


def _labels(places: Sequence[str]) -> list[str]:
    common = os.path.commonpath(places)
    labels = [clipped(os.path.relpath(place, common), _LONGEST_LABEL) for place in places]
    return [label if labels.count(label) == 1 else f"{number}: {label}" for number, label in enumerate(labels, 1)]


def _read(label: str, place: str, state: str | None) -> ComparedRun:
    path = Path(place)
    check_run(path)
    try:
        data, ranks = read_run(path), read_rank_history(path)
    except OSError as error:
        raise RunFailed(f"can't read {error.filename or path}: {error.strerror or error}") from error
    known_state = state or ("not finished" if data.summary is None else "finished")
    settings, figures = dict(_flat(data.config)), dict(final_figures(data, ranks))
    return ComparedRun(data, ranks, label, place, known_state, settings, figures)


def _flat(value: object, key: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    items: list[tuple[object, object]] = []
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, list) and any(isinstance(part, Mapping) for part in value):
        items = list(enumerate(value))
    if items and depth < _DEEPEST:
        for name, part in items:
            yield from _flat(part, f"{key}.{name}" if key else str(name), depth + 1)
    elif key:
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        yield plain_line(key), str(hidden_setting(key.rpartition(".")[2], text))


def final_figures(run: RunData, ranks: RankHistory) -> Iterator[tuple[str, Figure]]:
    """Yield name and value of each figure that is known."""
    loss, summary = run.trained_loss, run.summary or {}
    if len(loss.steps):
        yield "training loss", Figure(float(loss.values[-1]), "value")
    for name, metrics in last_evaluations(run).items():
        for metric, (_, value) in metrics.items():
            kind: Kind = "percent" if unit_of(metric) == "percent" else "value"
            yield f"{name} {metric.replace('_', ' ')}", Figure(value, kind)
    split, used = ranks.split(), goodput(run.folder)
    peak = next((peak for gauge in _MEMORY if (peak := ranks.peak(gauge)) is not None), None)
    candidates: list[tuple[str, float | None, Kind]] = [
        ("step time", ranks.step_seconds(), "seconds"),
        ("samples/s", median_speed(run, "samples"), "rate"),
        ("tokens/s", median_speed(run, "tokens") if throughput(run).name == "tokens" else None, "rate"),
        ("MFU", utilization(run), "percent"),
        *((f"time in {name}", part / sum(split.values()), "percent") for name, part in split.items() if part > 0),
        ("memory, most of a rank", peak[0] if peak is not None else None, "bytes"),
        ("duration", as_number(summary.get("seconds", run.last.get("seconds"))), "seconds"),
        ("steps", as_number(summary.get("steps", run.last.get("step"))), "count"),
        ("goodput", used.share if used is not None else None, "percent"),
        ("attempts", run.num_attempts, "count"),
        ("steps rolled back", sum(last - first for first, last in run.rollbacks) or None, "count"),
        ("updates discarded", len(run.discarded) or None, "count"),
    ]
    for name, figure, kind in candidates:
        if figure is not None and math.isfinite(figure):
            yield name, Figure(float(figure), kind)


# --- groups, differences --------------------------------------------------------------------------------------------


def _groups(runs: Sequence[ComparedRun]) -> tuple[RunGroup, ...]:
    members: dict[object, list[ComparedRun]] = {}
    for number, run in enumerate(runs):
        shared = frozenset((key, value) for key, value in run.settings.items() if key not in _OWN_KEYS)
        members.setdefault(shared or number, []).append(run)
    differing = _differences([group[0] for group in members.values()])
    keys = [key for key in list(differing) if key != _SEED][:3]
    groups = []
    for number, group in enumerate(members.values()):
        texts = {key: differing[key][number] for key in keys if not key.startswith("environment: ")}
        name = ", ".join(
            f"{key}={UNKNOWN if text is None else clipped(text, _LONGEST_LABEL)}" for key, text in texts.items()
        )
        shown = dict.fromkeys(figure for run in group for figure in run.figures)
        figures = {figure: _spread(group, figure) for figure in shown}
        groups.append(RunGroup(tuple(group), group[0].label if len(group) == 1 else (name or "all runs"), figures))
    return tuple(groups)


def _spread(runs: Sequence[ComparedRun], name: str) -> tuple[Figure, Figure, int]:
    figures = [run.figures[name] for run in runs if name in run.figures]
    values = np.array([figure.value for figure in figures])
    deviation = float(values.std(ddof=1)) if len(values) > 1 else math.nan
    return Figure(float(values.mean()), figures[0].kind), Figure(deviation, figures[0].kind), len(values)


def _spread_text(group: RunGroup, name: str) -> str:
    if name not in group.figures:
        return UNKNOWN
    mean, deviation, number = group.figures[name]
    spread = f" ± {deviation.text}" if number > 1 and math.isfinite(deviation.value) else ""
    return f"{mean.text}{spread}" + (f" (n = {number})" if number < len(group.runs) else "")


def _differences(runs: Sequence[ComparedRun]) -> dict[str, tuple[str | None, ...]]:
    """Return what isn't the same in all configs, and in what results may depend on beside them."""
    surroundings = [
        {f"environment: {name}": as_text(each[name]) for name in _SURROUNDINGS if name in each}
        for each in (run.data.environment for run in runs)
    ]
    tables = [{**run.settings, **around} for run, around in zip(runs, surroundings, strict=True)]
    keys = dict.fromkeys(key for table in tables for key in table if key != "run.folder")
    texts = {key: tuple(table.get(key) for table in tables) for key in keys}
    differing = {key: values for key, values in texts.items() if len(set(values)) > 1}
    return {
        key: values
        for key, values in differing.items()
        if not (set(values) <= {"{}", None} and any(other.startswith(f"{key}.") for other in differing))
    }


def _blocks(rows: Sequence[Sequence[str]], width: int | None) -> Iterator[str]:
    """Yield the lines of a table; columns that don't fit beside one another follow below, with the first one again."""
    most = _COLUMNS if width is None else width

    def cut(column: int, length: int) -> list[str]:
        return [plain_line(row[column]) if width is None else clipped(row[column], max(8, length)) for row in rows]

    first = cut(0, most // 2)
    others = [cut(column, most - 2 - max(map(len, first))) for column in range(1, len(rows[0]))]
    while True:
        block = [first]
        while others and (len(block) == 1 or sum(2 + max(map(len, c)) for c in [*block, others[0]]) - 2 <= most):
            block.append(others.pop(0))
        yield from formatting.aligned([*zip(*block, strict=True)], left={0})
        if not others:
            return
        yield ""


# --- the page -------------------------------------------------------------------------------------------------------


def write_comparison(comparison: SideBySide, output: Path | None = None) -> Path:
    """Write the page into `output`, compare.html by default, and return its path. Raises RunFailed."""
    return write_page(output or Path(PAGE), compose_comparison(comparison))


def compose_comparison(comparison: SideBySide) -> str:
    """Return the page."""
    runs, styles = comparison.runs, _styles(comparison)
    names = formatting.listed([run.label for run in runs], _NAMED_RUNS)
    groups = f", {len(comparison.groups)} configs" if comparison.has_seeds else ""
    now = date(time.strftime("%Y-%m-%dT%H:%M:%S%z"))
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
        charts=comparison_charts(comparison),
        draw=draw,
        final=comparison.figure_rows(),
        seeds=comparison.seed_rows(),
        differences=comparison.difference_rows(),
        footer=f"Made by Lockstep {__version__} on {now}.",
    )


def comparison_charts(comparison: SideBySide) -> list[Chart]:
    """Return a chart for each metric that two runs have, the loss first."""
    runs = [run.data for run in comparison.runs]
    metrics = [_metrics_of(run) for run in runs]
    names = dict.fromkeys(name for each in metrics for name in each)
    shared = [name for name in names if sum(name in each for each in metrics) > 1]
    logged = [name for name in shared if any(name in run.logged for run in runs)]
    drawn = [
        _chart(comparison, capitalized(name), [each.get(name) for each in metrics], unit_of(name))
        for name in shared
        if name not in logged[_MOST_LOGGED:]
    ]
    for title, column in (("Gradient norm", "grad_norm"), ("Learning rate", "lr")):
        drawn.append(_chart(comparison, title, [replace(run.columns[column], noisy=True) for run in runs], "plain"))
    unit = "tokens" if all(throughput(run).name == "tokens" for run in runs) else "samples"
    speeds = [speed(run, unit) for run in runs]
    drawn.append(_chart(comparison, f"{capitalized(unit)} per second", speeds, "rate", from_zero=True))
    charts = [chart for chart in drawn if chart is not None]
    edges = [(int(s.known_steps[0]), int(s.known_steps[-1])) for chart in charts for s in chart.series]
    first, last = min((low for low, _ in edges), default=0), max((high for _, high in edges), default=1)
    first = 0 if first < 0.5 * last or first == last else first
    return [replace(chart, first=first, last=last, is_large=number == 0) for number, chart in enumerate(charts)]


def _styles(comparison: SideBySide) -> dict[str, Series]:
    """Return empty series with color and dash by label: runs of a group share the color."""
    nothing = np.empty(0)
    return {
        run.label: Series(run.label, nothing, nothing, color=number, dash=number + number // 6 + member)
        for number, group in enumerate(comparison.groups)
        for member, run in enumerate(group.runs)
    }


def _chart(
    comparison: SideBySide, title: str, of_runs: Sequence[Series | None], unit: Unit, *, from_zero: bool = False
) -> Chart | None:
    styles = _styles(comparison)
    pairs = [(run.label, series) for run, series in zip(comparison.runs, of_runs, strict=True) if series is not None]
    known = {label: series for label, series in pairs if series.finite.any()}
    if len(known) < 2:
        return None
    drawn = [
        replace(_smoothed(each), name=label, noisy=False, color=styles[label].color, dash=styles[label].dash)
        for label, each in known.items()
    ]
    missing = [run.label for run in comparison.runs if run.label not in known]
    remarks = [
        *(["Running medians."] if any(each.is_smoothed for each in known.values()) else []),
        *([f"No finite value: {formatting.listed(missing, 5)}."] if missing else []),
    ]
    low, high = (pick(drawn, key=lambda each: each.known[-1]) for pick in (min, max))
    ends = [f"{value_text(float(each.known[-1]), unit)} ({each.name})" for each in (low, high)]
    finding = f"At the end from {ends[0]} to {ends[1]}"
    return Chart.of(title, finding, drawn, from_zero=from_zero, unit=unit, remarks=remarks)


def _smoothed(series: Series) -> Series:
    """Return the running median of noisy values, with their gaps; others as they are."""
    if not series.is_smoothed:
        return series
    median, gaps = running_median(series), series.steps[~series.finite]
    steps, values = np.concatenate([median.steps, gaps]), np.concatenate([median.values, np.full(len(gaps), np.nan)])
    return Series.of(series.name, steps, values)


def _row(run: ComparedRun, style: str) -> tuple[str, list[str], str]:
    restarts = formatting.listed([f"{step:,}" for step, _ in run.data.restarts], 5)
    rollbacks = formatting.listed([f"{last:,} to {first:,}" for first, last in run.data.rollbacks], 5)
    steps = run.data.columns["loss"].steps
    cells = [
        run.label,
        run.state,
        f"{steps[-1]:,.0f}" if len(steps) else "",
        f"at {restarts}" if restarts else "",
        f"from {rollbacks}" if rollbacks else "",
    ]
    return style, cells, run.place


def _flaws(comparison: SideBySide) -> Iterator[str]:
    for run in comparison.runs:
        for flaw in (*run.data.flaws, *run.ranks.flaws):
            yield f"{run.label}: {flaw}"
        if not run.data.last:
            yield f"{run.label}: no update is recorded."
    alone = [run.label for run in comparison.runs if not run.settings]
    if alone:
        yield f"Without a readable config, nothing is known of how these differ: {formatting.listed(alone, 5)}."
