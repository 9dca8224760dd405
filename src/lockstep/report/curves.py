"""The charts of a report, and what there is to see in each.

loss (training, and each evaluation set)      large
every other metric of the evaluations, gradient norm, learning rate, throughput, loss scale, what users logged
ranks: time of an update by rank and by phase (large), memory, use of GPUs
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from lockstep.core import formatting
from lockstep.report.charts import Chart, Marks, Unit, value_text
from lockstep.report.rank_history import RankHistory
from lockstep.report.run_data import RunData
from lockstep.report.series import Numbers, Series

MAX_LOGGED = 24  # charts of what users logged; more would not be looked at
_MOST_LINES = 6  # of ranks; of more, the fastest, the median and the slowest are drawn
_MEMORY = ("memory_allocated_peak", "memory_reserved", "memory_allocated", "memory_resident")
_UTILIZATION = ("gpu_utilization", "utilization")
_SMALL_SHARE = 0.005  # of an update, below which a phase isn't drawn


def charts(run: RunData) -> list[Chart]:
    """Return the charts, the loss first, without those that never were finite."""
    column = run.columns
    metrics = dict.fromkeys(name for metrics in run.evaluations.values() for name in metrics if name != "loss")
    evaluations = {name: _evaluation_series(run, name) for name in metrics}
    speed, loss_scale = throughput(run), column["loss_scale"]
    loss = [replace(column["loss"], name="training", noisy=True), *_evaluation_series(run, "loss")]
    drawn = [
        _chart("Loss", loss),
        *(
            _chart(capitalized(name), series, unit_of(name))
            for name, series in evaluations.items()
            if max(len(values.known) for values in series) > 1  # a single value is in the table
        ),
        _chart("Gradient norm", [replace(column["grad_norm"], noisy=True)]),
        _chart("Learning rate", [column["lr"]], from_zero=True),
        _chart(f"{capitalized(speed.name)} per second", [speed], "rate", from_zero=True),
        _chart("Loss scale", [loss_scale]) if (loss_scale.known != 1).any() else None,  # only of fp16
    ]
    for name, values in list(run.logged.items())[:MAX_LOGGED]:
        series = [Series.of(name, values, values.values(), noisy=True)]
        drawn.append(_chart(capitalized(name), series, unit_of(name)))
    charts = [chart for chart in drawn if chart is not None]
    first, last = _span(run, charts)
    marks = _marks(run)
    return [replace(chart, first=first, last=last, marks=marks, is_large=chart.title == "Loss") for chart in charts]


def _evaluation_series(run: RunData, metric: str) -> list[Series]:
    return [
        Series.of(name, metrics[metric], metrics[metric].values(), color=color)
        for color, (name, metrics) in enumerate(run.evaluations.items(), 1)
        if metric in metrics
    ]


def throughput(run: RunData) -> Series:
    """Return tokens per second if samples have tokens, else samples per second; the series has that name."""
    samples, tokens = run.columns["samples_per_second"], run.columns["tokens_per_second"]
    return speed(run, "tokens" if np.any(tokens.values > samples.values) else "samples")


def speed(run: RunData, unit: str) -> Series:
    """Return tokens or samples per second."""
    column = run.columns[f"{unit}_per_second"]
    known = ~(column.values <= 0)  # 0: nothing was measured yet
    return Series(unit, column.steps[known], column.values[known], noisy=True)


def median_speed(run: RunData, unit: str) -> float | None:
    """Return the median of the tokens or samples per second; None if nothing was measured."""
    known = speed(run, unit).known
    return float(np.median(known)) if len(known) else None


def utilization(run: RunData) -> float | None:
    """Return the MFU of the last attempt at the median of the tokens per second; None if it isn't known."""
    tokens = median_speed(run, "tokens")
    return run.attempts[-1].utilization(tokens) if run.attempts and tokens else None


def unit_of(metric: str) -> Unit:
    """Return percent for accuracies, as `formatting.metric` does."""
    return "percent" if metric.endswith("accuracy") else "plain"


def capitalized(name: str) -> str:
    """Return a name as a title: Bits per byte for bits_per_byte."""
    words = name.replace("_", " ").strip()
    return words[:1].upper() + words[1:]


def _chart(title: str, series: Sequence[Series], unit: Unit = "plain", *, from_zero: bool = False) -> Chart | None:
    drawn = [values for values in series if values.finite.any()]
    if not drawn:
        return None
    return Chart.of(title, _range_of(drawn[0], unit), drawn, from_zero=from_zero, unit=unit)


def _range_of(series: Series, unit: Unit) -> str:
    values, steps = series.known, series.known_steps
    texts = [value_text(value, unit) for value in values[np.array([0, -1, values.argmin(), values.argmax()])].tolist()]
    if texts[2] == texts[3]:
        return f"Always {texts[0]}"
    low, high = (f"{steps[at]:,.0f}" for at in (values.argmin(), values.argmax()))
    return f"From {texts[0]} to {texts[1]}; lowest {texts[2]} at step {low}, highest {texts[3]} at step {high}"


def _span(run: RunData, charts: Sequence[Chart]) -> tuple[int, int]:
    """Return the steps at the edges: from 0, unless the history begins far later."""
    drawn = [series for chart in charts for series in chart.series]
    first = min((int(series.steps[0]) for series in drawn), default=0)
    ends = [int(series.steps[-1]) for series in drawn]
    last = max([1, *ends, *(step for step, _ in run.restarts), *(save.step for save in run.saves)])
    return (0 if first < 0.5 * last or first == last else first), last


def _marks(run: RunData) -> Marks:
    return Marks(
        [step for step, _ in run.restarts],
        [step for step, _ in run.discarded],
        [save.step for save in run.saves if save.failure is None],
        [save.step for save in run.saves if save.failure is not None],
        sorted({step for metrics in run.evaluations.values() for steps in metrics.values() for step in steps}),
        run.rollbacks,
    )


# --- ranks ----------------------------------------------------------------------------------------------------------


def rank_charts(ranks: RankHistory, first: int, last: int, marks: Marks) -> list[Chart]:
    """Return the time of an update by rank and by phase, memory, and the use of GPUs, as far as measured."""
    drawn = [_times(ranks), _phases(ranks), *_gauges(ranks)]
    return [replace(chart, first=first, last=last, marks=marks) for chart in drawn if chart is not None]


def _times(ranks: RankHistory) -> Chart | None:
    numbers, seconds, means = ranks.computing()
    if len(numbers) < 2 or not np.isfinite(means).any():
        return None
    slowest, finite = int(np.nanargmax(means)), np.sort(means[np.isfinite(means)])
    lines = {f"rank {rank}": seconds[:, place] for place, rank in enumerate(numbers)}
    if len(numbers) > _MOST_LINES:
        ordered = np.sort(seconds, axis=1)  # what isn't known is last
        known = np.isfinite(ordered).sum(axis=1)
        places = {"slowest": known - 1, "median": (known - 1) // 2, "fastest": np.zeros(len(known), int)}
        lines = {name: ordered[np.arange(len(known)), place] for name, place in places.items()}
    return Chart.of(
        f"Time of an update by rank{', without waiting for others' if ranks.phases() else ''}, ms",
        f"Slowest: rank {numbers[slowest]}, {formatting.short_time(means[slowest])} an update; median rank "
        f"{formatting.short_time(finite[(len(finite) - 1) // 2])}",
        _colored(ranks.steps, {name: 1000 * values for name, values in lines.items() if np.isfinite(values).any()}),
        from_zero=True,
        is_large=True,
    )


def _phases(ranks: RankHistory) -> Chart | None:
    split = ranks.split()
    whole = sum(split.values())
    phases = {name: 1000 * values for name, values in ranks.phases().items()}
    shown = {name: phases[name] for name, seconds in split.items() if seconds > _SMALL_SHARE * whole}
    if not shown:
        return None
    longest = max(split, key=lambda name: split[name])
    finding = f"Mostly {longest}: {100 * split[longest] / whole:.0f} %"
    title, lines = "Time of an update by phase, mean over ranks, ms", _colored(ranks.steps, shown)
    return Chart.of(title, finding, lines, from_zero=True, is_large=True)


def _gauges(ranks: RankHistory) -> list[Chart]:
    charts = []
    for title, names in (("Memory by rank", _MEMORY), ("Use of GPUs, %", _UTILIZATION)):
        known = ((name, ranks.gauge(name)) for name in names)
        name, values = next(((name, values) for name, values in known if values is not None), ("", np.empty((0, 3))))
        if not name:
            continue
        most, size = float(np.nanmax(values)), ""
        if title == "Memory by rank":
            size, factor = ("GiB", 2.0**30) if most >= 2.0**30 else ("MiB", 2.0**20)
            title, values, most = f"{title}, {size}", values / factor, most / factor
        is_alone = all(len(interval.ranks) < 2 for interval in ranks.intervals)
        lines = {"rank 0": 1} if is_alone else {"max": 2, "mean": 1, "min": 0}
        finding = f"Most: {formatting.short(most)} {size}".rstrip() + f" ({name.replace('_', ' ')})"
        series = _colored(ranks.steps, {line: values[:, at] for line, at in lines.items()})
        charts.append(Chart.of(title, finding, series, from_zero=True))
    return charts


def _colored(steps: Numbers, lines: dict[str, Numbers]) -> list[Series]:
    return [Series(name, steps, values, color=color) for color, (name, values) in enumerate(lines.items())]


def straggler_rows(ranks: RankHistory, most: int = 12) -> list[list[str]]:
    """Return a table of the ranks that others waited for, the head first; empty if there are none."""
    rows = [
        [str(each.rank), each.host, f"{number:,} of {len(ranks.intervals):,}", f"{each.ratio:.1f}x", each.phase]
        for number, each in ranks.stragglers()[:most]
    ]
    return [["Rank", "host", "intervals", "time", "phase"], *rows] if rows else []
