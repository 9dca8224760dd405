"""The charts of a report, and what there is to see in each.

loss (training, and each evaluation set)      large
every other metric of the evaluations, gradient norm, learning rate, throughput, loss scale, what users logged
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from lockstep.report.charts import Chart, Marks
from lockstep.report.run_data import RunData
from lockstep.report.scales import Unit, fitted, value_text
from lockstep.report.series import Series

MAX_LOGGED = 24  # charts of what users logged; more would not be looked at

_Finding = Literal["fall", "change", "peak", "median", "median and peak"]


def charts(run: RunData) -> list[Chart]:
    """Return the charts, the loss first. There is none of what never was finite."""
    column = run.columns
    metrics = dict.fromkeys(name for metrics in run.evaluations.values() for name in metrics if name != "loss")
    evaluations = {name: evaluation_series(run, name) for name in metrics}
    speed, loss_scale = throughput(run), column["loss_scale"]
    drawn = [
        _chart("Loss", [replace(column["loss"], name="training", noisy=True), *evaluation_series(run, "loss")], "fall"),
        *(
            _chart(capitalized(name), series, "change", unit_of(name))
            for name, series in evaluations.items()
            if max(len(values.known) for values in series) > 1  # a single value is in the table
        ),
        _chart("Gradient norm", [replace(column["grad_norm"], noisy=True)], "median and peak"),
        _chart("Learning rate", [column["lr"]], "peak", from_zero=True),
        _chart(f"{capitalized(speed.name)} per second", [speed], "median", "rate", from_zero=True),
        _chart("Loss scale", [loss_scale], "change") if (loss_scale.known != 1).any() else None,  # of fp16 alone
        *(
            _chart(
                capitalized(name),
                [Series.of(name, values, values.values(), noisy=True)],
                "median and peak",
                unit_of(name),
            )
            for name, values in list(run.logged.items())[:MAX_LOGGED]
        ),
    ]
    charts = [chart for chart in drawn if chart is not None]
    first, last = _span(run, charts)
    marks = _marks(run)
    return [replace(chart, first=first, last=last, marks=marks, is_large=chart.title == "Loss") for chart in charts]


def evaluation_series(run: RunData, metric: str) -> list[Series]:
    """Return one series for each set that has the metric."""
    return [
        Series.of(name, metrics[metric], metrics[metric].values(), color=color)
        for color, (name, metrics) in enumerate(run.evaluations.items(), 1)
        if metric in metrics
    ]


def throughput(run: RunData) -> Series:
    """Return tokens per second if samples have tokens, otherwise samples; by the series' name."""
    samples, tokens = run.columns["samples_per_second"], run.columns["tokens_per_second"]
    name, chosen = ("tokens", tokens) if np.any(tokens.values > samples.values) else ("samples", samples)
    known = ~(chosen.values <= 0)  # 0: nothing was measured yet
    return Series(name, chosen.steps[known], chosen.values[known], noisy=True)


def unit_of(metric: str) -> Unit:
    """Return percent for accuracies, as `formatting.metric` does."""
    return "percent" if metric.endswith("accuracy") else "plain"


def capitalized(name: str) -> str:
    """Return a name as a title: Bits per byte for bits_per_byte."""
    words = name.replace("_", " ").strip()
    return words[:1].upper() + words[1:]


def _chart(
    title: str, series: Sequence[Series], finding: _Finding, unit: Unit = "plain", *, from_zero: bool = False
) -> Chart | None:
    """Return a chart with the finding of its first series; None if no value is finite."""
    drawn = [values for values in series if values.finite.any()]
    if not drawn:
        return None
    known = np.concatenate([values.known for values in drawn])
    most = 1.0 if unit == "percent" else math.inf
    scale = fitted(known, from_zero=from_zero, may_be_logarithmic=not from_zero, most=most)
    return Chart(title, _describe(drawn[0], finding, unit), drawn, scale, 0, 1, unit=unit)


def _describe(series: Series, finding: _Finding, unit: Unit) -> str:
    values, steps = series.known, series.known_steps
    first, last, median = (value_text(float(value), unit) for value in (values[0], values[-1], np.median(values)))
    lowest, highest = int(values.argmin()), int(values.argmax())
    peak = f"ighest {value_text(values[highest], unit)}, at step {steps[highest]:,.0f}"
    if finding == "peak":
        return f"H{peak}"
    if finding == "median":
        return f"Median {median}"
    if finding == "median and peak":
        return f"Median {median}; h{peak}"
    if len(values) == 1:
        return f"{last} at step {steps[0]:,.0f}, the only value"
    if finding == "change":
        return f"From {first} to {last}"
    if lowest == len(values) - 1:
        return f"From {first} to {last}, the lowest"
    return f"From {first} to {last}; lowest {value_text(values[lowest], unit)}, at step {steps[lowest]:,.0f}"


def _span(run: RunData, charts: Sequence[Chart]) -> tuple[int, int]:
    """Return the steps at the edges: from the start of the run, unless its history begins far later."""
    drawn = [series for chart in charts for series in chart.series]
    first = min((int(series.steps[0]) for series in drawn), default=0)
    ends = [int(series.steps[-1]) for series in drawn]
    last = max([1, *ends, *(step for step, _ in run.restarts), *(save.step for save in run.saves)])
    return (0 if first < 0.5 * last or first == last else first), last


def _marks(run: RunData) -> Marks:
    """Return the marks; restarts from the same step are one, and ranks are named if their number changes."""
    names_ranks = len({ranks for _, ranks in run.restarts}) > 1
    ranks_by_step: dict[int, list[int]] = {}
    for step, ranks in sorted(run.restarts, key=lambda restart: restart[0]):
        ranks_by_step.setdefault(step, []).append(ranks)
    labels = {}
    for step, numbers in ranks_by_step.items():
        times = f"restarted {len(numbers)} times" if len(numbers) > 1 else "restarted"
        ranks_text = f", {numbers[-1]} rank{'s' if numbers[-1] != 1 else ''}" if names_ranks and numbers[-1] else ""
        labels[step] = times + ranks_text
    return Marks(
        labels,
        [step for step, _ in run.discarded],
        [save.step for save in run.saves if save.failure is None],
        [save.step for save in run.saves if save.failure is not None],
        sorted({step for metrics in run.evaluations.values() for steps in metrics.values() for step in steps}),
        run.rollbacks,
    )
