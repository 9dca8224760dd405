"""The result of a verification as one HTML file without external resources, in the style of the training report.

header        the verdict
deviations    of each run that deviates: where, and the likely cause
runs          the table
tolerances, notes
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep import __version__
from lockstep.proof.rows import HEAD, Row, cells, explanation, largest
from lockstep.proof.tolerances import NORMALIZING_OPTIMIZERS
from lockstep.report.facts import date
from lockstep.report.html import render

if TYPE_CHECKING:
    from lockstep.proof.api import ComparedRuns

_LEGEND = (
    "Losses and norms are compared at each update, relative to the single process's. Gradients are compared parameter "
    "by parameter, relative to their norm, and weights after the last update, relative to the summed learning rate. "
    "Each figure is the largest difference of all updates and parameters.",
    "Adam and other normalizing optimizers divide a gradient by its own size, so rounding in a gradient near zero "
    "becomes a visible step. Each strategy therefore runs under SGD, too, where weights differ no more than gradients.",
)


def compose(recipe: str, result: ComparedRuns, steps: int, precision: str, verdict: str, tolerances: str) -> str:
    """Return the page as HTML."""
    rows = result.rows
    failed = [row for row in rows if row.passed is False]
    ranks = ", ".join(str(number) for number in dict.fromkeys(row.ranks for row in rows))
    now = date(time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    return render(
        "proof.html",
        Path(__file__).parent,
        title=f"{recipe}: verification",
        kicker="Strategies compared with a single process",
        heading=recipe,
        standfirst=verdict[:1].upper() + verdict[1:] + ".",
        state="Not verified" if failed else "Verified",
        byline=f" · {steps} updates · {precision} · on {ranks} ranks",
        flaws=[explanation(row) for row in failed],
        figures=_figures(rows),
        rows=[[*(word.capitalize() for word in HEAD[:-1]), ""], *(list(cells(row)) for row in rows)],
        tolerances=[tolerances[:1].upper() + tolerances[1:] + ".", *_LEGEND],
        notes=[*result.notes, *(explanation(row) for row in rows if row.status == "refused")],
        footer=f"Made by Lockstep {__version__} on {now}.",
    )


def _figures(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """Return the largest differences, each as (name, value, unit)."""
    compared = [row for row in rows if row.passed is not None]
    normalizing = [row.max_weight_difference for row in compared if row.optimizer in NORMALIZING_OPTIMIZERS]
    linear = [row.max_weight_difference for row in compared if row.optimizer not in NORMALIZING_OPTIMIZERS]
    figures = [
        ("Runs", f"{sum(row.passed is True for row in compared)} of {len(compared)}", "match the single process"),
        ("Loss", _largest(row.max_loss_difference for row in compared), "largest relative difference"),
        ("Gradient norm", _largest(row.max_norm_difference for row in compared), "before clipping, relative"),
        ("Gradient", _largest(row.max_gradient_difference for row in compared), "relative to a parameter's norm"),
        ("Weights, SGD", _largest(linear), "relative to the summed learning rate"),
        ("Weights, other", _largest(normalizing), "under normalizing optimizers"),
    ]
    return [figure for figure in figures if figure[1]]


def _largest(values: Iterable[float | None]) -> str:
    value = largest(values)
    return "" if value is None else f"{value:.1e}"
