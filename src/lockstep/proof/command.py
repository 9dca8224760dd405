"""Prints and writes the result of comparing every strategy with the single process.

Exit code 3: a run differs. Exit code 2: none could be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.core.errors import ConfigError, RunFailed, VerificationError
from lockstep.core.json_output import emit
from lockstep.core.terminal import echo
from lockstep.monitor.folder import write_atomically
from lockstep.proof.api import prove
from lockstep.proof.html import ProofPage, compose
from lockstep.proof.rows import Row, head, line, story
from lockstep.proof.tolerances import TOLERANCES
from lockstep.training.user_objects import UserObjects, refuse_given

if TYPE_CHECKING:
    from lockstep.config.loading import LoadedConfig
    from lockstep.proof.cases import Proof
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
    """Print a line for each run, the table and the verdict, and write the page; return the exit code.

    Args:
        recipe: What the config is called.
        strategies: Names separated by commas, or `all`.
        ranks: Numbers of processes to run each strategy on.
        steps: Updates of each run.
        page: Where to write the page; None: runs/verify-RECIPE.html.
        as_json: Print the rows as a JSON list.
        trust_remote_code: Let code that comes with a downloaded model run.
    """
    refuse_given(loaded)
    given = UserObjects(trust_remote_code=trust_remote_code)

    def begin(proof: Proof) -> None:
        missing = f"\nnote: {proof.missing}" if proof.missing else ""
        echo(f"{recipe}: {introduction(proof, steps, precision)}{missing}\n\n{head()}", flush=True)

    def show(row: Row) -> None:
        echo(line(row), flush=True)

    outcome, proof = prove(
        loaded.config,
        given,
        strategies,
        ranks,
        steps,
        precision,
        show=show,
        begin=begin,
    )
    rows = outcome.rows
    remarks = [*outcome.notes, *(f"not run: {reason}" for reason in proof.left_out)]
    summary = verdict(rows, proof.missing)
    echo(_end(rows, remarks, precision, summary))
    told = ProofPage(recipe, rows, tuple(remarks), steps, precision)
    echo(_write(told, summary, page or Path("runs") / f"verify-{Path(recipe).name}.html"), flush=True)
    if as_json:
        emit([row.as_json() for row in rows])
    if any(row.passed is False for row in rows):
        return VerificationError.exit_code
    return 0 if any(row.passed for row in rows) else ConfigError.exit_code


def introduction(proof: Proof, steps: int, precision: str) -> str:
    """Return what is going to be run, as a sentence."""
    runs = len(proof.cases)
    return (
        f"{runs} run{'s' * (runs != 1)} of {steps} update{'s' * (steps != 1)} beside the single process, in {precision}"
    )


def verdict(rows: Sequence[Row], missing: str | None) -> str:
    """Return the result in one sentence, with what the config asks for and no run had."""
    return f"{_of_runs(rows)}; but {missing}" if missing else _of_runs(rows)


def _of_runs(rows: Sequence[Row]) -> str:
    ran = [row for row in rows if row.passed is not None]
    failed = [row for row in ran if not row.passed]
    refused = len(rows) - len(ran)
    also = f"; {refused} refused" if refused else ""
    if failed:
        return f"{len(failed)} of {len(ran)} runs are not the single process's{also}"
    if not ran:
        return f"nothing was compared{also}"
    every = f"all {len(ran)} runs are" if len(ran) > 1 else "the run is"
    return f"{every} the single process's{also}"


def _end(rows: Sequence[Row], remarks: Sequence[str], precision: str, summary: str) -> str:
    parts = ["", *(f"{story(row)}\n" for row in rows if not row.passed)]
    parts += [f"{tolerances_text(precision)}", *(f"note: {remark}" for remark in remarks), "", summary]
    return "\n".join(parts)


def tolerances_text(precision: str) -> str:
    """Return the tolerances of a precision as a sentence."""
    limits = TOLERANCES[precision]
    return (
        f"tolerances of {precision}: loss {limits.loss:g} and norm {limits.norm:g}, relative; gradient "
        f"{limits.gradient:g} of each parameter's norm;\nweights {limits.weights:g} under sgd and "
        f"{limits.normalised:g} under rules that normalise, in summed learning rates (root mean square)"
    )


def _write(told: ProofPage, summary: str, path: Path) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, compose(told, summary, tolerances_text(told.precision)))
    except OSError as error:
        raise RunFailed(f"can't write {path}: {error.strerror or error}") from error
    return path
