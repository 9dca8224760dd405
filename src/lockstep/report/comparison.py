"""Compares runs: their final figures, how their configs differ, and what differs from seed to seed.

    folders --read_run--> ComparedRun --> final figures, side by side
                                      --> differences   dotted keys of configs that aren't the same everywhere
                                      --> RunGroup      configs equal but for seed and folder: mean and deviation

`comparison_page` makes a page of it, `text` a table for a terminal.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from lockstep.core import formatting
from lockstep.core.errors import ConfigError, RunFailed
from lockstep.core.secrets import hidden_setting
from lockstep.core.terminal import plain_line
from lockstep.monitor.attempts import read_attempts
from lockstep.monitor.goodput import goodput
from lockstep.report.curves import throughput
from lockstep.report.facts import as_text, last_evaluations
from lockstep.report.page import check_run
from lockstep.report.rank_history import RankHistory, read_rank_history
from lockstep.report.run_data import RunData, read_run
from lockstep.report.scales import value_text

MOST_RUNS = 64
_SEED = "run.seed"
_OWN_KEYS = (_SEED, "run.folder")
"""Keys in which runs of a group differ."""
_SURROUNDINGS = ("host", "platform", "cpu", "gpus", "git", "packages")
_LONGEST_LABEL = 36
_LONGEST_VALUE = 60
_DEEPEST = 12
_COLUMNS = 100  # of a table for a file or another program
UNKNOWN = "–"


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A run in a comparison.

    Attributes:
        label: Its name, which no other run of the comparison has.
        place: Its folder or address.
        state: What it does, such as `running`.
        settings: Its config, flat: text by dotted key; empty if it can't be read.
        figures: By name, in their order; those that aren't known are left out.
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
    """Runs whose configs are equal but for the seed and the folder.

    Attributes:
        name: What distinguishes it from the other groups.
        figures: Mean, deviation (of a sample; NaN if there is only one) and number of runs, by name.
    """

    runs: tuple[ComparedRun, ...]
    name: str
    figures: Mapping[str, tuple[Figure, Figure, int]]

    @property
    def seeds(self) -> list[str]:
        return [run.settings.get(_SEED, UNKNOWN) for run in self.runs]


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Runs beside one another.

    Attributes:
        groups: In the order of their first runs; each run is in one.
        differences: Texts by key, in the order of the runs; None where a run hasn't the key.
    """

    runs: tuple[ComparedRun, ...]
    groups: tuple[RunGroup, ...]
    differences: Mapping[str, tuple[str | None, ...]]

    @property
    def has_seeds(self) -> bool:
        """True if there is a group of several runs."""
        return len(self.groups) < len(self.runs)

    def figure_rows(self) -> list[list[str]]:
        """Return the final figures as a table, the head first."""
        names = _merged([run.figures for run in self.runs])
        return [
            ["Final", *(run.label for run in self.runs)],
            *([name, *(_text_of(run.figures.get(name)) for run in self.runs)] for name in names),
        ]

    def difference_rows(self) -> list[list[str]]:
        """Return the differences of the configs as a table, the head first; empty if there are none."""
        rows = [
            [key, *(UNKNOWN if text is None else clipped(text, _LONGEST_VALUE) for text in texts)]
            for key, texts in self.differences.items()
        ]
        return [["Config", *(run.label for run in self.runs)], *rows] if rows else []

    def seed_rows(self) -> list[list[str]]:
        """Return the figures over seeds as a table, the head first; empty if no run has a sibling."""
        if not self.has_seeds:
            return []
        names = _merged([group.figures for group in self.groups])
        return [
            ["Mean ± deviation", *(f"{group.name} (n = {len(group.runs)})" for group in self.groups)],
            ["seeds", *(clipped(", ".join(group.seeds), _LONGEST_VALUE) for group in self.groups)],
            *([name, *(_spread_text(group, name) for group in self.groups)] for name in names),
        ]


def compare(folders: Sequence[Path], states: Mapping[Path, str] | None = None) -> SideBySide:
    """Read runs and compare them.

    Args:
        states: What each run does, by its folder; otherwise whether it is finished.

    Raises:
        ConfigError: There are fewer than two runs, too many, or runs that have nothing in common.
        RunFailed: A folder is no run's, or can't be read.
    """
    distinct = list({os.path.realpath(folder): folder for folder in folders}.values())
    _check_number(folders, distinct)
    places = [os.path.abspath(folder) for folder in distinct]
    runs = tuple(
        _read(folder, label, place, (states or {}).get(folder))
        for folder, label, place in zip(distinct, _labels(places), places, strict=True)
    )
    _check_common(runs)
    return SideBySide(runs, _groups(runs), _differences(runs))


def text(comparison: SideBySide, width: int | None) -> str:
    """Return the tables as text of at most `width` columns, where columns of runs follow in blocks.

    None: for a file or another program, in which nothing is cut; then a block has as many runs as fit into 100 columns.
    """
    tables = [comparison.figure_rows(), comparison.seed_rows(), comparison.difference_rows()]
    if not comparison.difference_rows():
        tables.append([["The configs are equal but for run.folder."]])
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


def metrics_of(run: RunData) -> dict[str, str]:
    """Return the metrics of which the run has a finite value, with what they are: loss, evaluation, logged."""
    metrics = {"loss": "loss"} if run.columns["loss"].finite.any() else {}
    for name, of_set in run.evaluations.items():
        for metric, values in of_set.items():
            if any(map(math.isfinite, values.values())):
                metrics[f"{name} {metric}"] = "evaluation"
    for name, values in run.logged.items():
        if any(map(math.isfinite, values.values())):
            metrics.setdefault(name, "logged")
    return metrics


# --- reading --------------------------------------------------------------------------------------------------------


def _check_number(folders: Sequence[Path], distinct: Sequence[Path]) -> None:
    if not folders:
        raise ConfigError("there is no run to compare; name at least two runs, or a folder with runs in it")
    if len(distinct) == 1:
        same = " (named more than once)" if len(folders) > 1 else ""
        raise ConfigError(f"{distinct[0]} is a single run{same}; name at least two, or see `lockstep report`")
    if len(distinct) > MOST_RUNS:
        raise ConfigError(f"{len(distinct):,} runs are too many for one page; name at most {MOST_RUNS}")


def _check_common(runs: Sequence[ComparedRun]) -> None:
    """Raise ConfigError if no metric is there in two runs."""
    metrics = [metrics_of(run.data) for run in runs]
    if max(Counter(name for names in metrics for name in names).values(), default=0) < 2:
        parts = [
            f"{run.label} has {formatting.listed(list(names), 5) or 'none'}"
            for run, names in zip(runs[:5], metrics, strict=False)
        ]
        raise ConfigError(f"the runs have no metric in common: {'; '.join(parts)}; name runs that share one")


def _labels(places: Sequence[str]) -> list[str]:
    """Return the last part of each path, or as many parts as distinguish it."""
    paths = [tuple(filter(None, place.split("/"))) or ("/",) for place in places]
    labels = []
    for parts in paths:
        others = [other for other in paths if other != parts]
        length = next(
            (n for n in range(1, len(parts)) if all(other[-n:] != parts[-n:] for other in others)), len(parts)
        )
        labels.append(clipped("/".join(parts[-length:]), _LONGEST_LABEL))
    counts = Counter(labels)
    return [label if counts[label] == 1 else f"{number}: {label}" for number, label in enumerate(labels, 1)]


def _read(folder: Path, label: str, place: str, state: str | None) -> ComparedRun:
    path = Path(os.path.abspath(folder))
    check_run(path)
    try:
        data, ranks = read_run(path), read_rank_history(path)
    except OSError as error:
        raise RunFailed(f"can't read {error.filename or path}: {error.strerror or error}") from error
    known_state = state or ("not finished" if data.summary is None else "finished")
    settings, figures = dict(_flat(data.config)), dict(final_figures(data, ranks))
    return ComparedRun(data, ranks, label, place, known_state, settings, figures)


def _flat(value: object, key: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Yield dotted keys and values as text, without secrets."""
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


# --- groups, differences --------------------------------------------------------------------------------------------


def _groups(runs: Sequence[ComparedRun]) -> tuple[RunGroup, ...]:
    members: dict[object, list[ComparedRun]] = {}
    for number, run in enumerate(runs):
        shared = frozenset((key, value) for key, value in run.settings.items() if key not in _OWN_KEYS)
        members.setdefault(shared or number, []).append(run)
    firsts = [group[0] for group in members.values()]
    distinct = {key: texts for key, texts in _differences(firsts).items() if key != _SEED}
    named = [
        ", ".join(
            f"{key}={UNKNOWN if texts[number] is None else clipped(str(texts[number]), _LONGEST_LABEL)}"
            for key, texts in list(distinct.items())[:3]
            if not key.startswith("environment: ")
        )
        for number in range(len(firsts))
    ]
    return tuple(
        RunGroup(
            tuple(group),
            group[0].label if len(group) == 1 else (name or "all runs"),
            {name: _spread(group, name) for name in _merged([run.figures for run in group])},
        )
        for group, name in zip(members.values(), named, strict=True)
    )


def _merged(orders: Sequence[Iterable[str]]) -> list[str]:
    """Return all names, each once; one that the first run lacks stands behind the name before it."""
    merged: list[str] = []
    for order in orders:
        place = 0
        for name in order:
            if name not in merged:
                merged.insert(place, name)
            place = merged.index(name) + 1
    return merged


def _spread(runs: Sequence[ComparedRun], name: str) -> tuple[Figure, Figure, int]:
    """Return mean and deviation of a figure over the runs that have it, and their number."""
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
    tables = [{**run.settings, **_surroundings(run.data)} for run in runs]
    keys = dict.fromkeys(key for table in tables for key in table if key != "run.folder")
    texts = {key: tuple(table.get(key) for table in tables) for key in keys}
    differing = {key: values for key, values in texts.items() if len(set(values)) > 1}
    inner = tuple(differing)
    return {
        key: values
        for key, values in differing.items()
        if not (set(values) <= {"{}", None} and any(other.startswith(f"{key}.") for other in inner))
    }


def _surroundings(run: RunData) -> dict[str, str]:
    """Return what a run's results may depend on beside its config."""
    return {f"environment: {name}": as_text(run.environment[name]) for name in _SURROUNDINGS if name in run.environment}


# --- text -----------------------------------------------------------------------------------------------------------


def _text_of(figure: Figure | None) -> str:
    return UNKNOWN if figure is None else figure.text


def _blocks(rows: Sequence[Sequence[str]], width: int | None) -> Iterator[str]:
    """Yield the lines of a table; columns that don't fit beside one another follow below, with the first one again."""
    widths = [max(len(plain_line(row[column])) for row in rows) for column in range(len(rows[0]))]
    first, start, most = widths[0], 1, _COLUMNS if width is None else width
    if width is not None:
        first = min(first, max(8, width // 2))
        widths = [min(column, max(8, width - first - 2)) for column in widths]
    while True:
        end, used = start, first
        while end < len(widths) and (end == start or used + 2 + widths[end] <= most):
            used += 2 + widths[end]
            end += 1
        for row in rows:
            cells = [
                clipped(row[0], first).ljust(first),
                *(clipped(row[n], widths[n]).rjust(widths[n]) for n in range(start, end)),
            ]
            line = "  ".join(cells).rstrip()
            yield line if width is None else line[:width]
        if end >= len(widths):
            return
        start = end
        yield ""


_MEMORY = ("memory_allocated_peak", "memory_resident_peak", "memory_allocated", "memory_resident")

Kind = Literal["value", "percent", "seconds", "rate", "bytes", "count"]


@dataclass(frozen=True, slots=True)
class Figure:
    """A final figure of a run; its value may be NaN, as a loss is."""

    value: float
    kind: Kind

    @property
    def text(self) -> str:
        return figure_text(self.value, self.kind)


def figure_text(value: float, kind: Kind) -> str:
    """Return a figure as people read it."""
    if not math.isfinite(value):
        return "not finite"
    if kind == "seconds":
        return f"{1000 * value:.3g} ms" if abs(value) < 1 else formatting.duration(value)
    if kind == "bytes":
        return formatting.size(value)
    if kind == "count":
        return f"{value:,.0f}" if value == int(value) else f"{value:,.1f}"
    return value_text(value, "plain" if kind == "value" else kind)


def final_figures(run: RunData, ranks: RankHistory) -> Iterator[tuple[str, Figure]]:
    """Yield name and value of each figure that is known."""
    loss, summary = run.trained_loss, run.summary or {}
    if len(loss.steps):
        yield "training loss", Figure(float(loss.values[-1]), "value")
    for name, metrics in last_evaluations(run).items():
        for metric, (_, value) in metrics.items():
            yield (
                f"{name} {metric.replace('_', ' ')}",
                Figure(value, "percent" if metric.endswith("accuracy") else "value"),
            )
    candidates: list[tuple[str, float | None, Kind]] = [
        ("step time", ranks.step_seconds() or _step_seconds(run), "seconds"),
        ("samples/s", _median(run, "samples_per_second"), "rate"),
        ("tokens/s", _median(run, "tokens_per_second") if throughput(run).name == "tokens" else None, "rate"),
        ("MFU", _utilization(run), "percent"),
    ]
    split = ranks.split()
    whole = sum(split.values())
    candidates += [(f"time in {name}", seconds / whole, "percent") for name, seconds in split.items() if seconds > 0]
    used = goodput(run.folder)
    peaks = (ranks.peak(gauge) for gauge in _MEMORY)
    peak = next((peak for peak in peaks if peak is not None), None)
    candidates += [
        ("memory, most of a rank", peak[0] if peak is not None else None, "bytes"),
        ("duration", _number(summary.get("seconds", run.last.get("seconds"))), "seconds"),
        ("steps", _number(summary.get("steps", run.last.get("step"))), "count"),
        ("goodput", used.share if used is not None else None, "percent"),
        ("attempts", run.num_attempts, "count"),
        ("steps rolled back", sum(last - first for first, last in run.rollbacks) or None, "count"),
        ("updates discarded", len(run.discarded) or None, "count"),
    ]
    for name, number, kind in candidates:
        if number is not None and math.isfinite(number):
            yield name, Figure(float(number), kind)


def _step_seconds(run: RunData) -> float | None:
    """Return the seconds of a step at the median of the samples per second, where ranks.jsonl has no times."""
    samples, steps = (_number(run.last.get(name)) for name in ("samples", "step"))
    speed = _median(run, "samples_per_second")
    return samples / steps / speed if samples and steps and speed else None


def _median(run: RunData, column: str) -> float | None:
    known = run.columns[column].known
    known = known[known > 0]
    return float(np.median(known)) if len(known) else None


def _utilization(run: RunData) -> float | None:
    """Return the MFU of the last attempt at the median of the tokens per second; None if it isn't known."""
    attempts, tokens = read_attempts(run.folder), _median(run, "tokens_per_second")
    return attempts[-1].utilization(tokens) if attempts and tokens else None


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18
    return float(value) if is_number and isinstance(value, int | float) else None
