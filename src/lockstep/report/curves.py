"""Which charts a report shows, and what there is to see in each.

loss (training, and each evaluation set)      large
every other metric of the evaluations, gradient norm, learning rate, throughput, loss scale, what users logged
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

import numpy as np

from lockstep.report.charts import Chart, Marks, Restart
from lockstep.report.recorded import Events, Recorded
from lockstep.report.scales import Unit, fitted, said
from lockstep.report.series import Numbers, Series

MOST_LOGGED = 24  # charts of what users logged; more would not be looked at


def charts(recorded: Recorded) -> list[Chart]:
    """The first is the loss, if there is one. Nothing is drawn of what never was finite."""
    events = recorded.events
    drawn = [
        _loss(recorded),
        *(_evaluation(events, name) for name in _metrics(events) if name != "loss"),
        _gradient_norm(recorded),
        _learning_rate(recorded),
        _throughput(recorded),
        _loss_scale(recorded),
        *(_logged(events, name) for name in list(events.values)[:MOST_LOGGED]),
    ]
    kept = [chart for chart in drawn if chart is not None]
    first, last = _span(recorded, kept)
    marks = _marks(recorded)
    return [replace(chart, first=first, last=last, marks=marks) for chart in kept]


def evaluation_series(events: Events, metric: str) -> list[Series]:
    """One for each set that has it."""
    return [
        replace(Series.of(name, metrics[metric], metrics[metric].values()), colour=colour)
        for colour, (name, metrics) in enumerate(events.evaluations.items(), 1)
        if metric in metrics
    ]


def throughput(recorded: Recorded) -> Series:
    """Of tokens if samples have any, otherwise of samples; the name says which. 0 means that nothing was known yet."""
    samples, tokens = (recorded.updates.columns[f"{name}_per_second"] for name in ("samples", "tokens"))
    alike = np.array_equal(samples.values, tokens.values, equal_nan=True)
    name, chosen = ("samples", samples) if alike else ("tokens", tokens)
    known = ~(chosen.values <= 0)
    return Series(name, chosen.steps[known], chosen.values[known], noisy=True)


def unit_of(metric: str) -> Unit:
    """Accuracies are percentages; see `formatting.metric`."""
    return "percent" if metric.endswith("accuracy") else "plain"


def capitalised(name: str) -> str:
    """bits_per_byte as a title: Bits per byte."""
    words = name.replace("_", " ").strip()
    return words[:1].upper() + words[1:]


# --- one each -------------------------------------------------------------------------------------------------------


def _loss(recorded: Recorded) -> Chart | None:
    trained = replace(recorded.updates.columns["loss"], name="training", noisy=True)
    series = [trained, *evaluation_series(recorded.events, "loss")]
    chart = _chart("Loss", series, _fall, may_be_logarithmic=True)
    return chart and replace(chart, is_large=True)


def _evaluation(events: Events, metric: str) -> Chart | None:
    """From two values on: one alone stands in the table."""
    series = evaluation_series(events, metric)
    if max(len(one.known) for one in series) < 2:
        return None
    return _chart(capitalised(metric), series, _last, unit_of(metric), may_be_logarithmic=True)


def _gradient_norm(recorded: Recorded) -> Chart | None:
    series = replace(recorded.updates.columns["grad_norm"], name="gradient norm", noisy=True)
    return _chart("Gradient norm", [series], _middle_and_peak, may_be_logarithmic=True)


def _learning_rate(recorded: Recorded) -> Chart | None:
    series = replace(recorded.updates.columns["lr"], name="learning rate")
    return _chart("Learning rate", [series], _peak, from_zero=True)


def _throughput(recorded: Recorded) -> Chart | None:
    series = throughput(recorded)
    return _chart(capitalised(f"{series.name} per second"), [series], _middle, "rate", from_zero=True)


def _loss_scale(recorded: Recorded) -> Chart | None:
    """Only fp16 has one."""
    series = replace(recorded.updates.columns["loss_scale"], name="loss scale")
    return _chart("Loss scale", [series], _last, may_be_logarithmic=True) if (series.known != 1).any() else None


def _logged(events: Events, name: str) -> Chart | None:
    values = events.values[name]
    series = replace(Series.of(name, values, values.values()), noisy=True)
    return _chart(capitalised(name), [series], _middle_and_peak, unit_of(name), may_be_logarithmic=True)


def _chart(
    title: str,
    series: Sequence[Series],
    finding: Callable[[Series, Unit], str],
    unit: Unit = "plain",
    *,
    from_zero: bool = False,
    may_be_logarithmic: bool = False,
) -> Chart | None:
    """None if no value is finite. The finding is that of the first series."""
    known = [one for one in series if one.finite.any()]
    if not known:
        return None
    values = np.concatenate([one.known for one in known])
    scale = fitted(values, from_zero=from_zero, may_be_logarithmic=may_be_logarithmic)
    return Chart(title, finding(known[0], unit), known, scale, 0, 1, unit=unit)


# --- what there is to see -------------------------------------------------------------------------------------------


def _fall(series: Series, unit: Unit) -> str:
    if len(series.known) == 1:
        return _last(series, unit)
    lowest, found = (
        int(np.nanargmin(series.values)),
        f"From {said(series.known[0], unit)} to {said(series.last()[1], unit)}",
    )
    if series.steps[lowest] == series.last()[0]:
        return f"{found}, the lowest"
    return f"{found}; lowest {said(series.values[lowest], unit)}, at step {series.steps[lowest]:,.0f}"


def _last(series: Series, unit: Unit) -> str:
    step, value = series.last()
    if len(series.known) == 1:
        return f"{said(value, unit)}, at step {step:,} alone"
    return f"From {said(series.known[0], unit)} to {said(value, unit)}"


def _peak(series: Series, unit: Unit) -> str:
    highest = int(np.nanargmax(series.values))
    return f"Highest {said(series.values[highest], unit)}, at step {series.steps[highest]:,.0f}"


def _middle(series: Series, unit: Unit) -> str:
    return f"Median {said(_median(series.known), unit)}"


def _middle_and_peak(series: Series, unit: Unit) -> str:
    peak = _peak(series, unit)
    return f"{_middle(series, unit)}; {peak[0].lower()}{peak[1:]}"


def _median(values: Numbers) -> float:
    return float(np.median(values))


# --- steps and marks ------------------------------------------------------------------------------------------------


def _metrics(events: Events) -> list[str]:
    """Names, in the order in which they first come."""
    return list(dict.fromkeys(name for metrics in events.evaluations.values() for name in metrics))


def _span(recorded: Recorded, drawn: Iterable[Chart]) -> tuple[int, int]:
    """From the start of the run, unless its history begins far later."""
    edges = [series.steps[[0, -1]] for chart in drawn for series in chart.series]
    first = min((int(edge[0]) for edge in edges), default=0)
    last = max((int(edge[1]) for edge in edges), default=1)
    happened = [step for step, _ in recorded.events.restarts] + [save.step for save in recorded.events.saves]
    last = max([1, last, *happened])
    return (0 if first < 0.5 * last or first == last else first), last


def _marks(recorded: Recorded) -> Marks:
    events = recorded.events
    return Marks(
        _restarts(events.restarts),
        [step for step, _ in recorded.updates.discarded],
        [save.step for save in events.saves if save.failure is None],
        [save.step for save in events.saves if save.failure is not None],
    )


def _restarts(found: Sequence[tuple[int, int]]) -> list[Restart]:
    """Several from the same step are one mark; ranks are named if they aren't always as many."""
    names_ranks = len({ranks for _, ranks in found}) > 1
    by_step: dict[int, list[int]] = {}
    for step, ranks in sorted(found, key=lambda restart: restart[0]):
        by_step.setdefault(step, []).append(ranks)
    return [Restart(step, _restart_label(ranks, names_ranks)) for step, ranks in by_step.items()]


def _restart_label(ranks: Sequence[int], names_ranks: bool) -> str:
    times = f"restarted {len(ranks)} times" if len(ranks) > 1 else "restarted"
    number = f"{ranks[-1]} rank" + ("s" if ranks[-1] != 1 else "")
    return f"{times}, {number}" if names_ranks and ranks[-1] else times
