"""A proof as one page to read, on the paper of the training report: one file that needs nothing else.

masthead      what was proved, or wasn't
differences   of each run that isn't the same: where, and the likely reason
runs          the table
tolerances, remarks
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass

from lockstep import __version__
from lockstep.proof.rows import HEAD, Row, cells, story
from lockstep.proof.tolerances import NORMALISING
from lockstep.report import page
from lockstep.report.markup import Markup, element
from lockstep.report.wording import date


@dataclass(frozen=True, slots=True)
class Told:
    """What is shown."""

    recipe: str
    rows: tuple[Row, ...]
    remarks: tuple[str, ...]
    steps: int
    precision: str


def compose(told: Told, verdict: str, tolerances: str) -> str:
    """The page."""
    parts = [
        _masthead(told, verdict),
        _flaws(told),
        page.big_figures(_figures(told)),
        page.section("Runs", _table(told)),
        page.section(
            "How much may differ",
            element("p", tolerances[:1].upper() + tolerances[1:] + "."),
            *(element("p", words) for words in _LEGEND),
        ),
        _remarks(told),
        _footer(),
    ]
    return page.document(f"{told.recipe}: proof", element("main", *parts))


def _tolerances(said: str) -> Markup:
    words = (f"{said[:1].upper()}{said[1:]}.", *_LEGEND)
    return page.section("How much may differ", *(element("p", one) for one in words))


_LEGEND = (
    "Losses and norms are compared at each update, relative to the single process's. Of each parameter, gradients are "
    "compared in units of their norm, and weights after the last update in units of the summed learning rate. Shown is "
    "the largest difference of all updates and parameters.",
    "Adam and its like divide a gradient by its own size, so that rounding in a gradient near zero becomes a visible "
    "step: that is why each strategy is run under SGD too, where weights differ by no more than gradients do.",
)


def _masthead(told: Told, verdict: str) -> Markup:
    ranks = ", ".join(str(number) for number in dict.fromkeys(row.ranks for row in told.rows))
    byline = f" · {told.steps} updates · {told.precision} · on {ranks} ranks"
    return element(
        "header",
        element("p", "Strategies beside the single process", class_="kicker"),
        element("h1", told.recipe),
        element("p", verdict[:1].upper() + verdict[1:] + ".", class_="standfirst"),
        element("p", element("b", "Not proved" if _failed(told) else "Proved"), byline, class_="byline"),
    )


def _figures(told: Told) -> list[tuple[str, str, str]]:
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


def _failed(told: Told) -> list[Row]:
    return [row for row in told.rows if row.passed is False]


def _flaws(told: Told) -> Markup:
    failed = _failed(told)
    if not failed:
        return Markup()
    return element("div", *(element("p", story(row)) for row in failed), class_="flaws")


def _table(told: Told) -> Markup:
    return page.table([*(word.capitalize() for word in HEAD[:-1]), ""], [list(cells(row)) for row in told.rows])


def _remarks(told: Told) -> Markup:
    refused = [story(row) for row in told.rows if row.status == "refused"]
    remarks = [*told.remarks, *refused]
    return page.section("Remarks", *(element("p", words) for words in remarks)) if remarks else Markup()


def _footer() -> Markup:
    now = date(time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    return element("footer", element("p", f"Made by Lockstep {__version__} on {now}."))
