"""Starts ranks for the reference and then for all runs, and goes on where some of them fail.

    1 rank      references --> folder: what each did, step by step
    n ranks     one launch: every run of so many ranks, one after the other, in one process group
                refused: a row; the next goes on in the same ranks
                crashed: a row; the rest in new ranks

Only ranks compute: this process never touches torch, so that they can be forked from it.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.config.schema import Config
from lockstep.core.errors import ConfigError, Failure, Paused, RunFailed, Stopped
from lockstep.core.stopping import undo_on_stop
from lockstep.launch.local import launch
from lockstep.proof.cases import Case, Proof
from lockstep.proof.rows import Row, not_run, row_of
from lockstep.proof.tolerances import TOLERANCES
from lockstep.training.job import imports_ahead

if TYPE_CHECKING:
    from lockstep.distributed.process_group import World
    from lockstep.proof.trial import Tamper
    from lockstep.training.user_objects import UserObjects

Show = Callable[[Row], None]
_PATIENCE_S = 30.0
_FAILED, _NOTES, _CRASHED, _LOGS, _WHY = "failed", "notes.json", "crashed", "logs-", "why.txt"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Attributes:
    notes: what of the model makes runs depend on ranks, or was set otherwise for the proof.
    """

    rows: tuple[Row, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Orders:
    """What each rank of a launch is told.

    Attributes:
        folder: on this machine, for what ranks tell each other and the launcher.
        tamper: done to each run before its first update, but not to the reference: a fault to be found.
        show: rank 0 says each row as soon as it is there.
    """

    folder: Path
    cases: tuple[Case, ...]
    given: UserObjects
    steps: int
    precision: str
    tamper: Tamper | None
    show: Show | None


def conduct(
    proof: Proof,
    given: UserObjects,
    steps: int,
    precision: str,
    *,
    tamper: Tamper | None = None,
    show: Show | None = None,
) -> Outcome:
    """Raises:
    ConfigError: the single process can't be run as asked.
    RunFailed: it failed.
    Stopped: somebody asked for it.
    """
    with _folder() as folder:
        entry = partial(refer, proof.references, given, folder, steps)
        config = next(iter(proof.references.values()))
        code = launch(entry, 1, config.launch, None, apart=True, ahead=imports_ahead(config)).show()
        _stop_if_asked(code)
        if code == ConfigError.exit_code:
            raise ConfigError(f"the single process, which all others are compared with, can't be run: {_why(folder)}")
        if code:
            why = _why(folder) or f"exit code {code}"
            raise RunFailed(f"the single process, which all others are compared with, failed: {why}")
        notes = json.loads((folder / _NOTES).read_text())
        rows: dict[int, Row] = {}
        for one in proof.refused:
            rows[one.case.number] = row = not_run(one.case, "refused", one.reason)
            if show is not None:
                show(row)
        for ranks in dict.fromkeys(case.ranks for case in proof.cases):
            cases = tuple(case for case in proof.cases if case.ranks == ranks)
            rows |= _on_ranks(Orders(folder, cases, given, steps, precision, tamper, show))
    return Outcome(tuple(rows[number] for number in sorted(rows)), (*proof.notes, *notes))


@contextmanager
def _folder() -> Iterator[Path]:
    """A temporary one; of ranks that crashed, what they said stays."""
    path = Path(tempfile.mkdtemp(prefix="lockstep-verify-"))
    try:
        with undo_on_stop(partial(shutil.rmtree, path, ignore_errors=True)):
            yield path
    finally:
        crashed = (path / _CRASHED).exists()
        for entry in path.iterdir():
            if entry.is_dir() and not (crashed and entry.name.startswith(_LOGS)):
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.is_file():
                entry.unlink()
        if not crashed:
            path.rmdir()


def _on_ranks(orders: Orders) -> dict[int, Row]:
    """All cases of one number of ranks, in as many launches as it takes."""
    rows: dict[int, Row] = {}
    left = list(orders.cases)
    while left:
        code = _launched(orders, left)
        done = {case.number: row for case in left if (row := _read(orders.folder, case)) is not None}
        rows |= done
        left = [case for case in left if case.number not in done]
        if left and code:
            _stop_if_asked(code)
            crashed = left.pop(0)
            rows[crashed.number] = _crashed(orders, crashed, code)
        elif left:
            raise RunFailed(f"the ranks ended, and left nothing of {left[0].strategy}")
    return rows


def _launched(orders: Orders, left: Sequence[Case]) -> int:
    first = left[0]
    told = replace(orders, cases=tuple(left))
    logs = orders.folder / f"{_LOGS}{first.number}"
    try:
        entry, ahead = partial(_be_a_rank, told), imports_ahead(first.config)
        return launch(entry, first.ranks, first.config.launch, logs, apart=True, ahead=ahead).show()
    except ConfigError as refusal:
        for case in left:
            _tell(orders, case, not_run(case, "refused", str(refusal)))
        return 0


def _crashed(orders: Orders, case: Case, code: int) -> Row:
    (orders.folder / _CRASHED).touch()
    words = sorted(orders.folder.glob(f"{case.number}.{_FAILED}-*"), key=lambda path: path.stat().st_mtime)
    reason = words[0].read_text() if words else f"a rank ended with exit code {code}, and said nothing"
    row = not_run(case, "refused" if code == ConfigError.exit_code else "crashed", reason)
    if orders.show is not None:
        orders.show(row)
    return row


def _why(folder: Path) -> str:
    """What the single process has said; nothing: it couldn't."""
    file = folder / _WHY
    return file.read_text() if file.exists() else ""


def _stop_if_asked(code: int) -> None:
    if code in (Stopped.exit_code, Paused.exit_code):
        raise Stopped("stopped")


def _read(folder: Path, case: Case) -> Row | None:
    path = folder / f"{case.number}.json"
    if not path.exists():
        return None
    return Row(**{name: _number(value) for name, value in json.loads(path.read_text()).items()})


def _number(value: Any) -> Any:
    return float(value) if value in ("nan", "inf", "-inf") else value


def _tell(orders: Orders, case: Case, row: Row) -> None:
    """To the launcher, and to whoever looks on."""
    _put(orders.folder / f"{case.number}.json", json.dumps(row.as_json()))
    if orders.show is not None:
        orders.show(row)


# --- on a rank ------------------------------------------------------------------------------------------------------


def refer(references: Mapping[str, Config], given: UserObjects, folder: Path, steps: int) -> int:
    """On one rank: what all others are compared with, into `folder`."""
    from lockstep.distributed.process_group import joined
    from lockstep.proof.trial import record
    from lockstep.training.job import opened

    notes: list[str] = []
    try:
        with joined(next(iter(references.values())).launch, grouped=True):
            for name, config in references.items():
                with opened(config, _own(given)) as session:
                    notes = record(session, folder / name, steps)
    except Failure as failure:
        (folder / _WHY).write_text(str(failure))
        raise
    (folder / _NOTES).write_text(json.dumps(notes))
    return 0


def _be_a_rank(orders: Orders) -> int:
    from lockstep.distributed.process_group import joined

    with joined(orders.cases[0].config.launch, grouped=True) as world:
        for case in orders.cases:
            row = attempt(orders, case, world)
            if world.rank == 0:
                _tell(orders, case, row)
    return 0


def attempt(orders: Orders, case: Case, world: World) -> Row:
    """The row of one case. A failure that all ranks have leaves them fit for the next; any other ends them."""
    from lockstep.proof.trial import RunComparison
    from lockstep.training.job import opened

    began = time.monotonic()
    tolerance = TOLERANCES[orders.precision]
    comparison: RunComparison | None = None
    try:
        with opened(case.config, _own(orders.given)) as session:
            comparison = RunComparison(session, orders.folder / case.reference, orders.steps, tolerance, case.optimizer)
            comparison.run(orders.tamper)
    except Stopped:
        raise
    except Failure as failure:
        _say(orders.folder, case, world.rank, str(failure))
        if not _all_said(orders.folder, case, world.size):
            raise
        if isinstance(failure, ConfigError):
            return not_run(case, "refused", str(failure))
        if comparison is None:
            return not_run(case, "crashed", str(failure))
        comparison.evidence.said = str(failure)
    except Exception as error:
        _say(orders.folder, case, world.rank, "".join(traceback.format_exception_only(error)).strip())
        raise
    return row_of(case, comparison.evidence, tolerance, time.monotonic() - began)


def _own(given: UserObjects) -> UserObjects:
    """A module that was handed over is trained in place: each run gets a copy of its own."""
    made_here = given.model is None or not hasattr(given.model, "named_parameters")
    return given if made_here else replace(given, model=copy.deepcopy(given.model))


def _say(folder: Path, case: Case, rank: int, words: str) -> None:
    _put(folder / f"{case.number}.{_FAILED}-{rank}", words)


def _put(path: Path, text: str) -> None:
    """A file that appears whole."""
    part = path.with_name(f"part-of-{path.name}")
    part.write_text(text)
    os.replace(part, path)


def _all_said(folder: Path, case: Case, ranks: int) -> bool:
    """Whether all ranks have failed in this case: none of them waits for another in a collective."""
    until = time.monotonic() + _PATIENCE_S
    while time.monotonic() < until:
        if all((folder / f"{case.number}.{_FAILED}-{rank}").exists() for rank in range(ranks)):
            return True
        time.sleep(0.01)
    return False
