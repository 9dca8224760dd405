"""A proof as one page to read, in the style of the training report: one file that needs nothing else.

header        what was proved, or wasn't
differences   of each run that isn't the same: where, and the likely reason
runs          the table
tolerances, remarks
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from lockstep import __version__
from lockstep.proof.rows import HEAD, Row, cells, story
from lockstep.proof.tolerances import NORMALISING
from lockstep.report.facts import date
from lockstep.report.html import render

_LEGEND = (
    "Losses and norms are compared at each update, relative to the single process's. Of each parameter, gradients are "
    "compared in units of their norm, and weights after the last update in units of the summed learning rate. Shown is "
    "the largest difference of all updates and parameters.",
    "Adam and its like divide a gradient by its own size, so that rounding in a gradient near zero becomes a visible "
    "step: that is why each strategy is run under SGD too, where weights differ by no more than gradients do.",
)


@dataclass(frozen=True, slots=True)
class ProofPage:
    """What is shown."""

    recipe: str
    rows: tuple[Row, ...]
    remarks: tuple[str, ...]
    steps: int
    precision: str


def compose(told: ProofPage, verdict: str, tolerances: str) -> str:
    """Return the page."""
    failed = _failed(told)
    ranks = ", ".join(str(number) for number in dict.fromkeys(row.ranks for row in told.rows))
    now = date(time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    return render(
        "proof.html",
        Path(__file__).parent,
        title=f"{told.recipe}: proof",
        kicker="Strategies beside the single process",
        heading=told.recipe,
        standfirst=verdict[:1].upper() + verdict[1:] + ".",
        state="Not proved" if failed else "Proved",
        byline=f" · {told.steps} updates · {told.precision} · on {ranks} ranks",
        flaws=[story(row) for row in failed],
        figures=_figures(told),
        rows=[[*(word.capitalize() for word in HEAD[:-1]), ""], *(list(cells(row)) for row in told.rows)],
        tolerances=[tolerances[:1].upper() + tolerances[1:] + ".", *_LEGEND],
        remarks=[*told.remarks, *(story(row) for row in told.rows if row.status == "refused")],
        footer=f"Made by Lockstep {__version__} on {now}.",
    )


def _figures(told: ProofPage) -> list[tuple[str, str, str]]:
    """What differs most."""
    ran = [row for row in told.rows if row.passed is not None]
    normalised = [row.max_weight_difference for row in ran if row.optimizer in NORMALISING]
    linear = [row.max_weight_difference for row in ran if row.optimizer not in NORMALISING]
    figures = [
        ("Runs", f"{sum(row.passed is True for row in ran)} of {len(ran)}", "are the single process's"),
        ("Loss", _most(row.max_loss_difference for row in ran), "largest relative difference"),
        ("Gradient norm", _most(row.max_norm_difference for row in ran), "before clipping"),
        ("Gradient", _most(row.max_gradient_difference for row in ran), "of a parameter, of its norm"),
        ("Weights, SGD", _most(linear), "in summed learning rates"),
        ("Weights, else", _most(normalised), "under rules that normalise"),
    ]
    return [figure for figure in figures if figure[1]]


def _most(values: Iterable[float | None]) -> str:
    found = [value for value in values if value is not None]
    return f"{max(found, key=lambda value: (math.isnan(value), value)):.1e}" if found else ""


def _failed(told: ProofPage) -> list[Row]:
    return [row for row in told.rows if row.passed is False]
