"""What the verb verify does: a line a run while it goes, the table, the page; exit code 3 if one isn't the same run,
2 if none could be compared."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.core.errors import ConfigError, RunFailed, VerificationError
from lockstep.core.json_output import emit
from lockstep.core.terminal import echo
from lockstep.monitor.folder import write_atomically
from lockstep.proof.api import prove
from lockstep.proof.html import Told, compose
from lockstep.proof.rows import Row, head, line, story
from lockstep.proof.tolerances import TOLERANCES
from lockstep.training.user_objects import UserObjects, refuse_given

if TYPE_CHECKING:
    from lockstep.config.loading import LoadedConfig
    from lockstep.core.arguments import VerifyArguments
    from lockstep.proof.cases import Proof


def verify(loaded: LoadedConfig, recipe: str, arguments: VerifyArguments) -> int:
    """Returns the exit code."""
    refuse_given(loaded)
    given = UserObjects(trust_remote_code=arguments.trust_remote_code)

    def begin(proof: Proof) -> None:
        lacks = f"\nnote: {proof.missing}" if proof.missing else ""
        told = introduction(proof, arguments.steps, arguments.precision)
        echo(f"{recipe}: {told}{lacks}\n\n{head()}", flush=True)

    outcome, proof = prove(
        loaded.config,
        given,
        arguments.strategies,
        arguments.ranks,
        arguments.steps,
        arguments.precision,
        show=_show,
        begin=begin,
    )
    rows = outcome.rows
    remarks = [*outcome.notes, *(f"not run: {one}" for one in proof.left_out)]
    said_of_all = verdict(rows, proof.missing)
    echo(_end(rows, remarks, arguments.precision, said_of_all))
    told = Told(recipe, rows, tuple(remarks), arguments.steps, arguments.precision)
    echo(_write(told, said_of_all, arguments.html or Path("runs") / f"verify-{Path(recipe).name}.html"), flush=True)
    if arguments.json:
        emit([row.as_json() for row in rows])
    if any(row.passed is False for row in rows):
        return VerificationError.exit_code
    return 0 if any(row.passed for row in rows) else ConfigError.exit_code


def introduction(proof: Proof, steps: int, precision: str) -> str:
    """What is going to be run."""
    runs = len(proof.cases)
    return (
        f"{runs} run{'s' * (runs != 1)} of {steps} update{'s' * (steps != 1)} beside the single process, in {precision}"
    )


def verdict(rows: Sequence[Row], missing: str | None) -> str:
    """All in one sentence, with what the config asks for and no run was."""
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


def _show(row: Row) -> None:
    echo(line(row), flush=True)


def _end(rows: Sequence[Row], remarks: Sequence[str], precision: str, said_of_all: str) -> str:
    parts = ["", *(f"{story(row)}\n" for row in rows if not row.passed)]
    parts += [f"{said(precision)}", *(f"note: {remark}" for remark in remarks), "", said_of_all]
    return "\n".join(parts)


def said(precision: str) -> str:
    """The tolerances."""
    one = TOLERANCES[precision]
    return (
        f"tolerances of {precision}: loss {one.loss:g} and norm {one.norm:g}, relative; gradient {one.gradient:g} of "
        f"each parameter's norm;\nweights {one.weights:g} under sgd and {one.normalised:g} under rules that "
        f"normalise, in summed learning rates (root mean square)"
    )


def _write(told: Told, said_of_all: str, path: Path) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, compose(told, said_of_all, said(told.precision)))
    except OSError as error:
        raise RunFailed(f"can't write {path}: {error.strerror or error}") from error
    return path
