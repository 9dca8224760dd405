"""Prints and writes the comparison of every strategy with the single process."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep import __version__
from lockstep.assembly.user_objects import UserObjects, refuse_given
from lockstep.core.errors import ConfigError, RunFailed, VerificationError
from lockstep.core.files import write_atomically
from lockstep.core.formatting import counted
from lockstep.core.json_output import emit
from lockstep.core.terminal import echo
from lockstep.proof.api import compare_strategies
from lockstep.proof.rows import HEAD, Row, cells, explanation, explanations, line
from lockstep.proof.tolerances import TOLERANCES
from lockstep.report.facts import date
from lockstep.report.html import render

if TYPE_CHECKING:
    from lockstep.config.loading import LoadedConfig
    from lockstep.proof.api import ComparedRuns
    from lockstep.proof.cases import VerificationPlan
    from lockstep.strategies.fsdp import Precise


def verify(
    loaded: LoadedConfig,
    recipe: str,
    strategies: str,
    ranks: tuple[int, ...],
    steps: int,
    precision: Precise,
    *,
    page: Path | None,
    as_json: bool,
    trust_remote_code: bool,
) -> int:
    """Print a line for each run, the explanations and the verdict, and write the page; return the exit code.

    Args:
        recipe: Name of the config.
        strategies: Names separated by commas, or `all`.
        page: Where to write the page; None: runs/verify-RECIPE.html.
        as_json: Print the rows as a JSON list.
    """
    refuse_given(loaded)
    objects = UserObjects(trust_remote_code=trust_remote_code)

    def introduce(plan: VerificationPlan) -> None:
        runs = f"{counted(len(plan.cases), 'run')} of {counted(steps, 'update')}"
        note = f"\nnote: {plan.not_covered}" if plan.not_covered else ""
        echo(f"{recipe}: comparing {runs} with a single process, in {precision}{note}\n\n{line(HEAD)}", flush=True)

    def show(row: Row) -> None:
        echo(line(cells(row)), flush=True)

    result = compare_strategies(
        loaded.config, objects, strategies, ranks, steps, precision, show=show, introduce=introduce
    )
    rows, tolerances, summary = result.rows, _tolerances(precision), _verdict(result.rows)
    if result.not_covered:
        summary = f"{summary}; but {result.not_covered}"
    echo("")
    for text in explanations(rows):
        echo(f"{text}\n")
    echo("\n".join([tolerances, *(f"note: {note}" for note in result.notes), "", summary]))
    content = compose(recipe, result, steps, precision, summary, tolerances)
    echo(_write(content, page or Path("runs") / f"verify-{Path(recipe).name}.html"), flush=True)
    if as_json:
        emit([row.as_json() for row in rows])
    if any(row.passed is False for row in rows):
        return VerificationError.exit_code
    return 0 if any(row.passed for row in rows) else ConfigError.exit_code


def _verdict(rows: Sequence[Row]) -> str:
    compared = [row for row in rows if row.passed is not None]
    failed = [row for row in compared if not row.passed]
    refused = len(rows) - len(compared)
    also = f"; {refused} refused" if refused else ""
    if failed:
        return f"{len(failed)} of {len(compared)} runs deviate from the single process{also}"
    return f"all {len(compared)} runs match the single process{also}" if compared else f"nothing was compared{also}"


def _tolerances(precision: str) -> str:
    limits = TOLERANCES[precision]
    return (
        f"tolerances of {precision}: loss {limits.loss:g} and norm {limits.norm:g}, relative; gradient "
        f"{limits.gradient:g} of each parameter's norm;\nweights {limits.weights:g} under SGD and "
        f"{limits.normalized_weights:g} under normalizing optimizers, relative to the summed learning rate (root mean "
        "square)"
    )


def _write(page: str, path: Path) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, page)
    except OSError as error:
        raise RunFailed(f"can't write {path}: {error.strerror or error}") from error
    return path


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
        figures=[],
        rows=[[*(word.capitalize() for word in HEAD[:-1]), ""], *(list(cells(row)) for row in rows)],
        tolerances=[tolerances[:1].upper() + tolerances[1:] + "."],
        notes=[*result.notes, *(explanation(row) for row in rows if row.status == "refused")],
        footer=f"Made by Lockstep {__version__} on {now}.",
    )
