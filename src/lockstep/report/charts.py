"""Line charts over steps, as SVG: numbers in, markup out. `chart.html` has the elements.

             ▼ restarted                           above: restarts; hanging there: discarded updates
    5.0  .___:______'_'___________________
         |`. :  |                                  thin: values, thinned out; thick: their running median
    2.5  |  `:--|-----:._____-------------
         |___:________:__|________________         a shade where a value isn't finite: the line has a gap there
          ' ' ' ' ' ' ' ' ' ' ' ' ' ' ' '          below: a tick for each save
    step 0       100      200      300

The svg has no viewBox: heights are pixels, places along the steps are percents of the width, and only the curves are
in a frame that is stretched. So letters and strokes keep their size on a phone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from lockstep.report.html import render
from lockstep.report.scales import Scale, Unit, step_ticks, tick_labels, ticks, value_text
from lockstep.report.series import Numbers, Series, gaps, running_median, thin

_COLORS = 6
_ROWS = 10  # of the table of a chart
_DOTTED = 25  # values up to which each gets a dot
_SLOTS = 500  # places along a chart at which a mark can stand
TOP, BOTTOM = 16, 26
"""Pixels above and below the plot."""
STRETCH = 1000
"""Width of the stretched frame, in its own units."""
_LEFT_EDGE = 0.04  # of the width, where a label would run into the word "step"
_LABEL_WIDTH = 0.16  # of the width, for the label of a restart


@dataclass(frozen=True, slots=True)
class Marks:
    """Steps at which something happened; restarts with their labels, rollbacks with the step reached before."""

    restarts: Mapping[int, str] = field(default_factory=dict)
    discarded: Sequence[int] = ()
    saves: Sequence[int] = ()
    failed_saves: Sequence[int] = ()
    evaluations: Sequence[int] = ()
    rollbacks: Sequence[tuple[int, int]] = ()


@dataclass(frozen=True, slots=True)
class Band:
    """A stretch of values at each step, such as mean - deviation to mean + deviation, in the color of a series."""

    series: Series
    low: Numbers
    high: Numbers


class DrawnChart(Protocol):
    """A chart along the steps of a run, on which marks can stand."""

    @property
    def height(self) -> int: ...
    @property
    def marks(self) -> Marks: ...
    def along(self, steps: Numbers) -> Numbers: ...


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart.

    Attributes:
        title: what is shown; `finding` states what there is to see.
        series: at least one, each with a finite value.
        first: the step at the left edge; `last` at the right.
        is_large: over the whole width, with labels beside its restarts.
        bands: behind the series.
        points: kind (a CSS class), step, and a series, on which the mark stands.
        remarks: on how it is drawn.
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
    bands: Sequence[Band] = ()
    points: Sequence[tuple[str, int, Series]] = ()
    remarks: Sequence[str] = ()

    @property
    def height(self) -> int:
        """Pixels."""
        return 340 if self.is_large else 200

    @property
    def plot_height(self) -> int:
        return self.height - TOP - BOTTOM

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
        """The step of the newest value."""
        return max(int(series.known_steps[-1]) for series in self.series)

    @property
    def notes(self) -> list[str]:
        """Remarks on how the chart is drawn."""
        notes = [*self.remarks, *(["Logarithmic scale."] if self.scale.is_logarithmic else [])]
        for series in self.series:
            if series.is_smoothed:
                notes.append(f"Thin: as logged. Thick: running median of {series.window:,} values.")
            if missing := len(series.values) - len(series.known):
                of = f" of {series.name}" if len(self.series) > 1 else ""
                verb = f"value{of} is" if missing == 1 else f"values{of} are"
                notes.append(f"{missing:,} {verb} not finite: a gap, shaded.")
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
        top=TOP,
        bottom=chart.height - BOTTOM,
        stretch=STRETCH,
        rules=[
            (_short(TOP + height), _short(TOP + height + 4), label)
            for height, label in zip(chart.down(np.array(values)), tick_labels(values, chart.unit), strict=True)
        ],
        step_labels=[
            (_percent(place), "step" if label == "0" or place >= _LEFT_EDGE else "", label)
            for place, label in zip(label_places, labels, strict=True)
        ],
        gap=_gap_path(chart),
        curves=[curve for series in drawn_first_last for curve in _curves(chart, series)],
        dots=[dot for series in drawn_first_last for dot in _dots(chart, series)],
        marks=mark_lines(chart),
        restarts=restart_lines(chart, labeled=chart.is_large),
        rollbacks=rollback_bands(chart),
        bands=[(color_class(band.series), _band_path(chart, band)) for band in chart.bands],
        points=_points(chart),
    )


def _band_path(chart: Chart, band: Band) -> str:
    kept = thin(band.series.steps, band.high, _SLOTS // 5)
    along = (chart.along(band.series.steps[kept]) * STRETCH).tolist()
    high, low = (chart.down(values[kept]).tolist() for values in (band.high, band.low))
    corners = [*zip(along, high, strict=True), *reversed(list(zip(along, low, strict=True)))]
    return "M" + "L".join(f"{_short(x)} {_short(y)}" for x, y in corners) + "z"


def _points(chart: Chart) -> list[tuple[str, str, str]]:
    """Return class, place and height of each mark on a curve; on a stretch without values none."""
    points = []
    for kind, step, series in chart.points:
        if series.known_steps[0] <= step <= series.known_steps[-1]:
            value = np.interp([float(step)], series.known_steps, series.known)
            place = float(chart.along(np.array(float(step))))
            points.append((f"{kind} {color_class(series)}", _percent(place), _short(TOP + chart.down(value)[0])))
    return points


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
    is_member = any(band.series.color == series.color and band.series is not series for band in chart.bands)
    kind, path = f"line {color_class(series)}{' member' if is_member else ''}", _path(chart, steps, values)
    if not series.is_smoothed:
        return [(kind, path, points)]
    median = running_median(series)
    return [(f"{kind} thin", path, points), (kind, _path(chart, median.steps, median.values), "")]


def _path(chart: Chart, steps: Numbers, values: Numbers) -> str:
    """Return a path, lifted where a value is missing; a value between two missing ones is a dot (`h0`, round ends)."""
    parts, pen = [], "M"
    for x, y in zip((chart.along(steps) * STRETCH).tolist(), chart.down(values).tolist(), strict=True):
        if y != y:
            pen = "M"
            continue
        parts.append(f"{pen}{_short(x)} {_short(y)}" + ("h0" if pen == "M" else ""))
        pen = "L"
    return "".join(parts)


def _dots(chart: Chart, series: Series) -> list[tuple[str, str, str]]:
    """Return class and place of a dot on every value if there are few, otherwise on the last one."""
    chosen = slice(None) if len(series.known) <= _DOTTED else slice(-1, None)
    places, heights = chart.along(series.known_steps[chosen]), chart.down(series.known[chosen])
    return [
        (color_class(series), _percent(place), _short(TOP + height))
        for place, height in zip(places, heights, strict=True)
    ]


def _gap_path(chart: Chart) -> str:
    """Return a shade over each stretch of values that aren't finite, by its stroke at least two pixels wide."""
    stretches = {
        (_short(first), _short(last))
        for series in chart.series
        for first, last in np.round(chart.along(np.array(gaps(series), dtype=float).reshape(-1, 2)) * STRETCH)
    }
    return "".join(f"M{first} 0H{last}v{chart.plot_height}H{first}z" for first, last in sorted(stretches))


def mark_lines(chart: DrawnChart) -> list[tuple[str, str, int, int]]:
    """Return class, place, top and bottom of the mark of each save, evaluation and discarded update."""
    bottom = chart.height - BOTTOM
    return [
        (kind, place, top, top + length)
        for kind, marked, top, length in (
            ("save", chart.marks.saves, bottom + 1, 4),
            ("failed", chart.marks.failed_saves, bottom + 1, 7),
            ("evaluated", chart.marks.evaluations, TOP, 5),
            ("discarded", chart.marks.discarded, TOP, 7),
        )
        for place in _distinct_places(chart, marked)
    ]


def restart_lines(chart: DrawnChart, *, labeled: bool = False) -> list[tuple[str, str]]:
    """Return place and label of each restart; no label where there is no space for it."""
    free_from, restarts = 0.0, []
    for step, label in chart.marks.restarts.items():
        place = float(chart.along(np.array(step, dtype=float)))
        is_labeled = labeled and free_from <= place <= 1 - _LABEL_WIDTH
        free_from = place + _LABEL_WIDTH if is_labeled else free_from
        restarts.append((_percent(place), label if is_labeled else ""))
    return restarts


def rollback_bands(chart: DrawnChart) -> list[tuple[str, str]]:
    """Return place and width of each stretch of steps that was made again after a restart."""
    bands = []
    for first, last in chart.marks.rollbacks:
        left, right = np.clip(chart.along(np.array([first, last], dtype=float)), 0.0, 1.0).tolist()
        bands.append((_percent(left), _percent(max(right - left, 0.002))))
    return bands


def _distinct_places(chart: DrawnChart, steps: Sequence[int]) -> list[str]:
    """Return the places of marks, once each."""
    slots = np.unique(np.round(chart.along(np.array(steps, dtype=float)) * _SLOTS))
    return [f"{100 * slot / _SLOTS:g}%" for slot in slots]


def _percent(place: float) -> str:
    return f"{100 * place:.2f}%"


def _short(number: float) -> str:
    return f"{round(number, 1):g}"
