"""Line charts over steps, as SVG. Pure functions: numbers in, markup out.

             ▼ restarted                           above: restarts; hanging there: discarded updates
    5.0  .___:______'_'___________________
         |`. :  |                                  thin: what was logged, thinned; thick: its running median
    2.5  |  `:--|-----:._____-------------
         |___:________:__|________________         a shade where a value isn't finite: the line has a gap there
          ' ' ' ' ' ' ' ' ' ' ' ' ' ' ' '          below: a tick for each save
    step 0       100      200      300

The svg has no viewBox: heights are pixels, places along the steps per cent of whatever width it gets, and only the
curves lie in a frame of their own that is stretched. So letters and strokes keep their size on a telephone.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lockstep.report.markup import Markup, element, joined
from lockstep.report.scales import Scale, Unit, step_ticks, tick_labels, ticks
from lockstep.report.series import Numbers, Series, gaps, running_median, thin

_COLOURS = 6
_DOTTED = 25  # values up to which each gets a dot
_SLOTS = 500  # places along a chart at which a mark can stand
_TOP, _BOTTOM = 16, 26  # pixels above and below the plot
_STRETCH = 1000  # width of the stretched frame, in its own units
_LEFT_EDGE = 4  # per cent
_LABEL_ROOM = 0.16  # of the width, for what is written beside a restart


@dataclass(frozen=True, slots=True)
class Restart:
    """Attributes:
    label: what is written beside it, where there is room.
    """

    step: int
    label: str


@dataclass(frozen=True, slots=True)
class Marks:
    """What happened, by step."""

    restarts: Sequence[Restart] = ()
    discarded: Sequence[int] = ()
    saves: Sequence[int] = ()
    failed_saves: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """Attributes:
    title: what is shown; `finding` says what there is to see.
    series: one at least, each with a finite value.
    first, last: the steps at the edges.
    is_large: over the whole width, with words beside its marks.
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

    @property
    def height(self) -> int:
        """Pixels."""
        return 340 if self.is_large else 200

    @property
    def plot_height(self) -> int:
        return self.height - _TOP - _BOTTOM

    def place(self, steps: Numbers) -> Numbers:
        """0 at the left edge, 1 at the right."""
        return (steps - self.first) / max(1, self.last - self.first)


def colour(series: Series) -> str:
    """The classes that give it; when all have been used, they come again with dashes."""
    return f"s{series.colour % _COLOURS}" + (" again" if series.colour >= _COLOURS else "")


def draw(chart: Chart) -> Markup:
    """The svg. Its `data-` attributes are what the page's script needs to say what is under the pointer."""
    plot = chart.plot_height
    stretched = [_gaps(chart), *(_curves(chart, series) for series in reversed(chart.series))]  # the first on top
    return element(
        "svg",
        _grid(chart),
        _saves(chart),
        element(
            "svg",
            *stretched,
            y=_TOP,
            width="100%",
            height=plot,
            viewBox=f"0 0 {_STRETCH} {plot}",
            preserveAspectRatio="none",
            overflow="visible",
        ),
        _dots(chart),
        _discarded(chart),
        _restarts(chart),
        class_="chart",
        role="img",
        aria_label=f"{chart.title}. {chart.finding}",
        width="100%",
        height=chart.height,
        data_first=chart.first,
        data_last=chart.last,
        data_low=chart.scale.low,
        data_high=chart.scale.high,
        data_logarithmic="" if chart.scale.is_logarithmic else None,
        data_top=_TOP,
        data_plot=plot,
        data_unit=chart.unit,
    )


# --- axes -----------------------------------------------------------------------------------------------------------


def _grid(chart: Chart) -> Markup:
    values = ticks(chart.scale)
    heights = _pixels(chart, np.array(values))
    labels = tick_labels(values, chart.unit)
    rules = [_rule(height, label) for height, label in zip(heights, labels, strict=True)]
    base = element("line", class_="base", x1=0, x2="100%", y1=_bottom(chart), y2=_bottom(chart))
    return joined([*rules, base, _step_axis(chart)])


def _rule(height: float, label: str) -> Markup:
    line = element("line", class_="grid", x1=0, x2="100%", y1=_short(height), y2=_short(height))
    return joined([line, element("text", label, class_="value", x=-8, y=_short(height + 4))])


def _step_axis(chart: Chart) -> Markup:
    steps = step_ticks(chart.first, chart.last)
    places = _percent(chart, steps)
    labels = [_step_label(chart, *place) for place in zip(places, tick_labels(steps, "plain"), strict=True)]
    return joined([element("text", "step", class_="value", x=-8, y=chart.height - 4), *labels])


def _step_label(chart: Chart, place: str, label: str) -> Markup:
    """In the middle below its place, but clear of the word on the left."""
    kind = "" if label != "0" and float(place.rstrip("%")) < _LEFT_EDGE else "step"
    return element("text", label, class_=kind, x=place, y=chart.height - 4)


# --- curves ---------------------------------------------------------------------------------------------------------


def _curves(chart: Chart, series: Series) -> Markup:
    kept = thin(series.steps, series.values, 800 if chart.is_large else 300)
    steps, values = series.steps[kept], series.values[kept]
    logged = element(
        "path",
        class_=f"line {colour(series)}" + (" thin" if series.is_smoothed else ""),
        d=_path(chart, steps, values),
        data_points=_points(steps, values),
    )
    if not series.is_smoothed:
        return logged
    median = running_median(series)
    path = _path(chart, median.steps, median.values)
    return joined([logged, element("path", class_=f"line {colour(series)}", d=path)])


def _path(chart: Chart, steps: Numbers, values: Numbers) -> str:
    """Lifted where a value is missing; a value between two that are missing is a dot (`h0`, round ends)."""
    along = (chart.place(steps) * _STRETCH).tolist()
    down = ((1 - chart.scale.heights(values)) * chart.plot_height).tolist()
    parts, pen = [], "M"
    for x, y in zip(along, down, strict=True):
        if y != y:
            pen = "M"
            continue
        parts.append(f"{pen}{_short(x)} {_short(y)}" + ("h0" if pen == "M" else ""))
        pen = "L"
    return "".join(parts)


def _points(steps: Numbers, values: Numbers) -> str:
    """`STEPS_SINCE_THE_ONE_BEFORE VALUE,...` of the finite ones."""
    known = np.isfinite(values)
    since = np.diff(steps[known], prepend=0.0).tolist()
    return ",".join(f"{step:.0f} {value:.5g}" for step, value in zip(since, values[known].tolist(), strict=True))


def _dots(chart: Chart) -> Markup:
    """On every value if there are few; on the last one always."""
    return joined(
        element("circle", class_=f"dot {colour(series)}", cx=place, cy=_short(height), r=2.5)
        for series in reversed(chart.series)
        for place, height in _dotted(chart, series)
    )


def _dotted(chart: Chart, series: Series) -> Iterable[tuple[str, float]]:
    chosen = slice(None) if len(series.known) <= _DOTTED else slice(-1, None)
    steps, values = series.steps[series.finite][chosen], series.known[chosen]
    return zip(_percent(chart, steps), _pixels(chart, values), strict=True)


def _gaps(chart: Chart) -> Markup:
    """A shade over each stretch of values that aren't finite, two pixels wide at least (by its stroke)."""
    stretches = {
        (_short(first), _short(last))
        for series in chart.series
        for first, last in np.round(chart.place(np.array(gaps(series), dtype=float).reshape(-1, 2)) * _STRETCH, 0)
    }
    if not stretches:
        return Markup()
    path = "".join(f"M{first} 0H{last}v{chart.plot_height}H{first}z" for first, last in sorted(stretches))
    return element("path", class_="gap", d=path)


# --- marks ----------------------------------------------------------------------------------------------------------


def _saves(chart: Chart) -> Markup:
    good, failed = chart.marks.saves, chart.marks.failed_saves
    bottom = _bottom(chart)
    return joined([*_ticks_at(chart, good, "save", bottom + 1, 4), *_ticks_at(chart, failed, "failed", bottom + 1, 7)])


def _discarded(chart: Chart) -> Markup:
    return joined(_ticks_at(chart, chart.marks.discarded, "discarded", _TOP, 7))


def _ticks_at(chart: Chart, steps: Sequence[int], kind: str, top: float, length: float) -> list[Markup]:
    return [
        element("line", class_=kind, x1=place, x2=place, y1=top, y2=top + length) for place in _spread(chart, steps)
    ]


def _restarts(chart: Chart) -> Markup:
    written_until = -1.0
    parts = []
    for restart in chart.marks.restarts:
        share = float(chart.place(np.array(restart.step, dtype=float)))
        place = f"{100 * share:.2f}%"
        parts.append(element("line", class_="restart", x1=place, x2=place, y1=_TOP - 4, y2=_bottom(chart)))
        head = element("path", class_="head", d="M-4.5 -7h9l-4.5 7z")
        parts.append(element("svg", head, x=place, y=_TOP - 4, overflow="visible"))
        if chart.is_large and written_until <= share <= 1 - _LABEL_ROOM:
            parts.append(element("svg", element("text", restart.label, x=8, y=-1), class_="label", x=place, y=_TOP - 4))
            written_until = share + _LABEL_ROOM
    return joined(parts)


def _spread(chart: Chart, steps: Sequence[int]) -> list[str]:
    """Of marks in the same place, one."""
    slots = np.unique(np.round(chart.place(np.array(steps, dtype=float)) * _SLOTS))
    return [f"{100 * slot / _SLOTS:g}%" for slot in slots]


# --- places ---------------------------------------------------------------------------------------------------------


def _percent(chart: Chart, steps: Sequence[float] | Numbers) -> list[str]:
    return [f"{100 * place:.2f}%" for place in chart.place(np.asarray(steps, dtype=float))]


def _pixels(chart: Chart, values: Numbers) -> list[float]:
    """From the top of the svg."""
    return [_TOP + (1 - height) * chart.plot_height for height in chart.scale.heights(values).tolist()]


def _bottom(chart: Chart) -> int:
    return chart.height - _BOTTOM


def _short(number: float) -> str:
    return f"{round(number, 1):g}"
