"""Line charts over steps, as SVG: numbers in, markup out. `chart.html` has the elements.

             ▼                                     above: restarts; hanging there: discarded updates
    5.0  .___:______'_'___________________
         |`. :  |                                  thin: values, thinned out; thick: their running median
    2.5  |  `:--|-----:._____-------------
         |___:________:__|________________         a shade where a value isn't finite: the line has a gap there
          ' ' ' ' ' ' ' ' ' ' ' ' ' ' ' '          below: a tick for each save
    step 0       100      200      300

Without a viewBox, heights are pixels and places along the steps are percents of the width; only the curves are in a
stretched frame. So letters and strokes keep their size on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from lockstep.core import formatting
from lockstep.report.html import render
from lockstep.report.series import Numbers, Series, gaps, running_median, thin

Unit = Literal["plain", "percent", "rate"]

_COLORS = 6
_ROWS = 10  # of the table of a chart
_SLOTS = 500  # places along a chart where a mark can stand
_TOP, _BOTTOM = 16, 26  # pixels above and below the plot
_STRETCH = 1000  # width of the stretched frame, in its own units
_LEFT_EDGE = 0.04  # of the width, where a label would run into the word "step"
_STEEP = 20.0  # largest value over the median; above it a logarithmic scale shows more
_NEAR_ZERO = 0.35  # lowest value over the largest; up to it the axis begins at zero
_DECADES = 12  # of a logarithmic scale, at most


# --- scales ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis from `low` to `high`, with ticks every `step`; None: logarithmic."""

    low: float
    high: float
    step: float | None

    @property
    def is_logarithmic(self) -> bool:
        return self.step is None

    def heights(self, values: Numbers) -> Numbers:
        """Return 0 for the bottom, 1 for the top; NaN stays NaN, and values outside are at the edge."""
        inside = np.clip(values, self.low, self.high)
        if self.is_logarithmic:
            return np.asarray(np.log(inside / self.low) / math.log(self.high / self.low))
        return np.asarray((inside - self.low) / (self.high - self.low))


def fitted(values: Numbers, *, from_zero: bool = False, may_be_logarithmic: bool = False) -> Scale:
    """Return a scale that shows all values, at least one and all finite; it begins at a tick."""
    low, high = float(values.min()), float(values.max())
    if may_be_logarithmic and low > 0 and high > _STEEP * float(np.median(values)):
        low = max(low, high * 10.0**-_DECADES)
        below, above = 10.0 ** math.floor(math.log10(low)), 10.0 ** math.floor(math.log10(high))
        return Scale(
            max(factor * below for factor in (1, 2, 5) if factor * below <= low * (1 + 1e-9)),
            min(factor * above for factor in (1, 2, 5, 10) if factor * above >= high * (1 - 1e-9)),
            step=None,
        )
    if from_zero or 0 < low < _NEAR_ZERO * high:
        low = min(low, 0.0)
    if high - low <= 1e-6 * max(abs(low), abs(high)):  # all alike: in the middle
        margin = abs(high) / 2 or 1.0
        low, high = low - margin, high + margin
    step = _round_step(high - low, 4)
    return Scale(step * math.floor(low / step + 1e-6), step * math.ceil(2 * high / step - 1e-6) / 2, step)


def ticks(scale: Scale) -> list[float]:
    """Return about four round values, or the powers of ten."""
    if scale.step is not None:
        lowest, highest = round(scale.low / scale.step), math.floor(scale.high / scale.step + 1e-6)
        return [number * scale.step for number in range(lowest, highest + 1)]
    first, last = math.floor(math.log10(scale.low) + 1e-9), math.ceil(math.log10(scale.high) - 1e-9)
    factors = (1, 2, 5) if scale.high <= 100.1 * scale.low else (1,)
    powers = range(first, last + 1, math.ceil((last - first) / 7))
    values = [factor * 10.0**power for power in powers for factor in factors]
    return [value for value in values if scale.low * (1 - 1e-9) <= value <= scale.high * (1 + 1e-9)]


def step_ticks(first: int, last: int) -> list[int]:
    """Return about five round steps between the two."""
    step = max(1, round(_round_step(max(1, last - first), 5)))
    return list(range(-(-first // step) * step, last + 1, step))


def value_text(value: float, unit: Unit) -> str:
    """Return a value as people read it, in legends and under the pointer."""
    if not math.isfinite(value):
        return "not finite"
    if unit == "percent":
        return f"{100 * value:.2f} %"
    return formatting.short(value) if unit == "rate" else formatting.value(value)


def tick_labels(values: Sequence[float], unit: Unit) -> list[str]:
    """Return short labels: 0.5; 2,500; 20k; 98 %."""
    if unit == "percent":
        return [label + " %" for label in tick_labels([100 * value for value in values], "plain")]
    short = [_trimmed(formatting.short(value)) for value in values]
    if max(map(abs, values), default=0.0) >= 10_000 and len(set(short)) == len(short):
        return short
    return [f"{value:,.9g}" for value in values]


def _round_step(length: float, number: int) -> float:
    """Return 1, 2 or 5 times a power of ten, so that about `number` of them make up `length`."""
    rough = length / number
    power = 10.0 ** math.floor(math.log10(rough))
    return float(min((factor * power for factor in (1, 2, 5, 10)), key=lambda step: abs(math.log(step / rough))))


def _trimmed(text: str) -> str:
    """Return 1.5M for 1.50M."""
    number = text.rstrip("TGMk")
    return (number.rstrip("0").rstrip(".") if "." in number else number) + text[len(number) :]


# --- charts ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Marks:
    """Steps with an event; of rollbacks the first and the last step."""

    restarts: Sequence[int] = ()
    discarded: Sequence[int] = ()
    saves: Sequence[int] = ()
    failed_saves: Sequence[int] = ()
    evaluations: Sequence[int] = ()
    rollbacks: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart.

    Attributes:
        finding: What there is to see, in a sentence.
        series: At least one, each with a finite value.
        first, last: The steps at the left and the right edge.
        is_large: Over the whole width of the page.
        remarks: On how it is drawn.
    """

    title: str
    finding: str
    series: Sequence[Series]
    scale: Scale
    first: int
    last: int
    marks: Marks = field(default_factory=Marks)
    unit: Unit = "plain"
    is_large: bool = False
    remarks: Sequence[str] = ()

    @classmethod
    def of(
        cls, title: str, finding: str, series: Sequence[Series], *, from_zero: bool = False, **options: Any
    ) -> Chart:
        """Return a chart whose scale shows all values; `options` are other attributes."""
        known = np.concatenate([each.known for each in series])
        scale = fitted(known, from_zero=from_zero, may_be_logarithmic=not from_zero)
        return cls(title, finding, series, scale, 0, 1, **options)

    @property
    def height(self) -> int:
        return 340 if self.is_large else 200

    @property
    def plot_height(self) -> int:
        return self.height - _TOP - _BOTTOM

    @property
    def values(self) -> list[tuple[Series, str, str]]:
        """The series with their CSS classes and last values: the legend."""
        return [(series, color_class(series), value_text(series.known[-1], self.unit)) for series in self.series]

    @property
    def rows(self) -> list[list[str]]:
        """A table of the values at about ten steps, the head first, for those who can't see the curves."""
        steps = np.unique(np.concatenate([series.known_steps for series in self.series]))
        chosen = steps[np.unique(np.linspace(0, len(steps) - 1, min(_ROWS, len(steps))).round().astype(int))]
        columns = [_values_at(series, chosen, self.unit) for series in self.series]
        return [["Step", *(series.name for series in self.series)]] + [
            [f"{step:,.0f}", *texts] for step, *texts in zip(chosen, *columns, strict=True)
        ]

    @property
    def last_step(self) -> int:
        return max(int(series.known_steps[-1]) for series in self.series)

    @property
    def notes(self) -> list[str]:
        notes = [*self.remarks, *(["Logarithmic scale."] if self.scale.is_logarithmic else [])]
        for series in self.series:
            if series.is_smoothed:
                notes.append(f"Thin: as logged. Thick: running median of {series.window:,} values.")
            if missing := len(series.values) - len(series.known):
                notes.append(f"Not finite, shaded: {formatting.counted(missing, 'value')} of {series.name}.")
        return notes

    def along(self, steps: Numbers) -> Numbers:
        """Return 0 for the left edge, 1 for the right."""
        return (steps - self.first) / max(1, self.last - self.first)

    def down(self, values: Numbers) -> Numbers:
        """Return pixels below the plot's upper edge."""
        return (1 - self.scale.heights(values)) * self.plot_height


def color_class(series: Series) -> str:
    """Return the classes that give a series its color and dash; both together differ for 36 colors."""
    dash = series.color + series.color // _COLORS if series.dash is None else series.dash
    return f"s{series.color % _COLORS} d{dash % _COLORS}"


def _values_at(series: Series, steps: Numbers, unit: Unit) -> list[str]:
    """Return the newest value up to each step; empty before the first and after the last."""
    places = np.searchsorted(series.known_steps, steps, side="right") - 1
    return [
        value_text(series.known[place], unit) if place >= 0 and step <= series.known_steps[-1] else ""
        for place, step in zip(places, steps, strict=True)
    ]


def draw(chart: Chart) -> str:
    """Return the svg, with `data-` attributes for page.js, which shows the values under the pointer."""
    values, steps = ticks(chart.scale), step_ticks(chart.first, chart.last)
    labels, label_places = tick_labels(steps, "plain"), chart.along(np.array(steps, dtype=float))
    drawn_first_last = list(reversed(chart.series))
    return render(
        "chart.html",
        chart=chart,
        top=_TOP,
        bottom=chart.height - _BOTTOM,
        stretch=_STRETCH,
        rules=[
            (_short(_TOP + height), _short(_TOP + height + 4), label)
            for height, label in zip(chart.down(np.array(values)), tick_labels(values, chart.unit), strict=True)
        ],
        step_labels=[
            (_percent(place), "step" if label == "0" or place >= _LEFT_EDGE else "", label)
            for place, label in zip(label_places, labels, strict=True)
        ],
        gap=_gap_path(chart),
        curves=[curve for series in drawn_first_last for curve in _curves(chart, series)],
        marks=_mark_lines(chart),
        restarts=_distinct_places(chart, chart.marks.restarts),
        rollbacks=_rollback_bands(chart),
    )


def _curves(chart: Chart, series: Series) -> list[tuple[str, str, str]]:
    """Return class, path and data points: the values, thin if their median is drawn over them.

    The data points are what page.js shows: for each point of the path its step, as a difference, and its value as text.
    """
    kept = thin(series.steps, series.values, (800 if chart.is_large else 300) // (1 + len(chart.series) // 4))
    steps, values = series.steps[kept], series.values[kept]
    finite = np.isfinite(values)
    since = np.diff(steps[finite], prepend=0.0).tolist()  # steps since the point before
    texts = (value_text(value, chart.unit) for value in values[finite].tolist())
    points = ",".join(f"{step:.0f} {text}" for step, text in zip(since, texts, strict=True))
    kind, path = f"line {color_class(series)}", _path(chart, steps, values)
    if not series.is_smoothed:
        return [(kind, path, points)]
    median = running_median(series)
    return [(f"{kind} thin", path, points), (kind, _path(chart, median.steps, median.values), "")]


def _path(chart: Chart, steps: Numbers, values: Numbers) -> str:
    """Return a path, lifted where a value is missing; a value between two missing ones is a dot (`h0`, round ends)."""
    parts, pen = [], "M"
    for x, y in zip((chart.along(steps) * _STRETCH).tolist(), chart.down(values).tolist(), strict=True):
        if y != y:
            pen = "M"
            continue
        parts.append(f"{pen}{_short(x)} {_short(y)}" + ("h0" if pen == "M" else ""))
        pen = "L"
    return "".join(parts)


def _gap_path(chart: Chart) -> str:
    """Return a shade over each stretch of values that aren't finite, by its stroke at least two pixels wide."""
    stretches = {
        (_short(first), _short(last))
        for series in chart.series
        for first, last in np.round(chart.along(np.array(gaps(series), dtype=float).reshape(-1, 2)) * _STRETCH)
    }
    return "".join(f"M{first} 0H{last}v{chart.plot_height}H{first}z" for first, last in sorted(stretches))


def _mark_lines(chart: Chart) -> list[tuple[str, str, int, int]]:
    """Return class, place, top and bottom of the mark of each save, evaluation and discarded update."""
    bottom = chart.height - _BOTTOM
    return [
        (kind, place, top, top + length)
        for kind, marked, top, length in (
            ("save", chart.marks.saves, bottom + 1, 4),
            ("failed", chart.marks.failed_saves, bottom + 1, 7),
            ("evaluated", chart.marks.evaluations, _TOP, 5),
            ("discarded", chart.marks.discarded, _TOP, 7),
        )
        for place in _distinct_places(chart, marked)
    ]


def _rollback_bands(chart: Chart) -> list[tuple[str, str]]:
    bands = []
    for first, last in chart.marks.rollbacks:
        left, right = np.clip(chart.along(np.array([first, last], dtype=float)), 0.0, 1.0).tolist()
        bands.append((_percent(left), _percent(max(right - left, 0.002))))
    return bands


def _distinct_places(chart: Chart, steps: Sequence[int]) -> list[str]:
    slots = np.unique(np.round(chart.along(np.array(steps, dtype=float)) * _SLOTS))
    return [f"{100 * slot / _SLOTS:g}%" for slot in slots]


def _percent(place: float) -> str:
    return f"{100 * place:.2f}%"


def _short(number: float) -> str:
    return f"{round(number, 1):g}"
