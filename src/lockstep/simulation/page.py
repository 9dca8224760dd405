"""A plan as one page to read: a step's parts as bars, for each strategy or cluster; and time against cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from lockstep import __version__
from lockstep.core.formatting import value
from lockstep.report.html import render, write_page
from lockstep.simulation.timing import SHARES, StepTime

_HERE = Path(__file__).parent
_COLORS = {part: f"var(--{'cp'[number > 5]}{number % 6})" for number, part in enumerate(SHARES)}


@dataclass(frozen=True, slots=True)
class PlannedStep:
    """A bar of the page: a strategy or a cluster, with the hours and the cost of the run if they are known."""

    label: str
    step: StepTime
    note: str = ""
    hours: float | None = None
    cost: float | None = None


class _Point(NamedTuple):
    label: str
    left: float  # percents of the chart
    top: float
    is_best: bool  # nothing is both faster and cheaper


def write_plan(file: Path, heading: str, steps: Sequence[PlannedStep], currency: str = "") -> Path:
    """Write the page and return its path. Raises RunFailed."""
    shown = [part for part in SHARES if any(each.step.parts[part] > each.step.seconds / 1000 for each in steps)]
    table = [("", "ms", *shown, "MFU", "hours", currency and f"cost, {currency}", "")]
    for each in steps:
        parts = (f"{each.step.parts[part] / each.step.seconds:.0%}" for part in shown)
        hours = "" if each.hours is None else value(each.hours)
        costs = (f"{each.step.mfu:.1%}", hours, "" if each.cost is None else f"{each.cost:,.2f}")
        row = (each.label, f"{1000 * each.step.seconds:,.1f}", *parts, *costs, each.note)
        table.append(row)
    longest = max((each.step.seconds for each in steps), default=1.0)
    bars = [(each.label, each.note, _segments(each.step, shown, longest)) for each in steps]
    keys = [(part, _COLORS[part]) for part in shown]
    values = {"title": f"{heading}: plan", "kicker": "Plan", "heading": heading, "standfirst": "", "state": "predicted"}
    empty = {"byline": "", "flaws": (), "figures": (), "footer": f"Made by Lockstep {__version__}."}
    content = {"bars": bars, "keys": keys, "table": table, "points": _points(steps), "currency": currency}
    return write_page(file, render("plan.html", _HERE, **values, **empty, **content))


def _segments(step: StepTime, shown: Sequence[str], longest: float) -> list[tuple[str, str, float, float]]:
    """Return the parts of a bar: name with its time, color, left edge and width in percents."""
    segments, left = [], 0.0
    for part in SHARES:
        if part in shown:
            width = 100 * step.parts[part] / longest
            segments.append((f"{part}: {1000 * step.parts[part]:,.1f} ms", _COLORS[part], left, width))
            left += width
    return segments


def _points(steps: Sequence[PlannedStep]) -> list[_Point]:
    """Return the runs with known hours and cost, the fastest first, in a chart that begins at 0."""
    known = sorted((each.hours, each.cost, each.label) for each in steps if each.hours and each.cost)
    if len(known) < 2:
        return []
    most_hours, most_cost = known[-1][0], max(cost for _, cost, _ in known)
    points, cheapest = [], float("inf")
    for hours, cost, label in known:
        text = f"{label.partition(',')[0]}: {value(hours)} hours, {cost:,.2f}"
        points.append(_Point(text, 90 * hours / most_hours, 100 - 90 * cost / most_cost, cost < cheapest))
        cheapest = min(cheapest, cost)
    return points
