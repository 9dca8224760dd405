"""Launches the ranks of all runs, and continues where some of them fail.

    1 rank      references --> folder: a record of each step
    n ranks     one launch: every run on n ranks, one after the other, in one process group
                refused: a row; the same ranks continue with the next run
                crashed: a row; new ranks continue with the rest

This process never imports torch, so that ranks can be forked from it.
"""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.config.schema import Config
from lockstep.core.errors import ConfigError, Failure, Paused, RunFailed, Stopped
from lockstep.core.files import write_atomically
from lockstep.core.stopping import undo_on_stop
from lockstep.launch.local import launch
from lockstep.proof.cases import Case, VerificationPlan
from lockstep.proof.rows import Row, not_run, row_of
from lockstep.proof.tolerances import TOLERANCES
from lockstep.training.ahead import imports_ahead

if TYPE_CHECKING:
    from lockstep.assembly.user_objects import UserObjects
    from lockstep.distributed.process_group import World
    from lockstep.proof.comparison import Tamper

_FAILURE_WAIT_S = 30.0
_FAILED, _NOTES, _CRASHED, _LOGS, _REASON = "failed", "notes.json", "crashed", "logs-", "reason.txt"


@dataclass(frozen=True, slots=True)
class VerificationJob:
    """Everything a launch needs; pickled where ranks can't be forked.

    Attributes:
        folder: For what ranks exchange with each other and with the launcher.
        tamper: Called with each session before its first step, except the reference's.
        show: Called with each row as soon as it is known.
    """

    folder: Path
    cases: tuple[Case, ...]
    objects: UserObjects
    steps: int
    precision: str
    tamper: Tamper | None
    show: Callable[[Row], None] | None

    def report(self, row: Row) -> Row:
        if self.show is not None:
            self.show(row)
        return row

    def save(self, case: Case, row: Row) -> None:
        """Report a row and hand it to the launcher."""
        write_atomically(self.folder / f"{case.number}.json", json.dumps(asdict(self.report(row))))


def run_plan(
    plan: VerificationPlan,
    objects: UserObjects,
    steps: int,
    precision: str,
    *,
    tamper: Tamper | None = None,
    show: Callable[[Row], None] | None = None,
) -> tuple[list[Row], list[str]]:
    """Run all cases; return their rows, and notes on what depends on ranks by design.

    Raises:
        ConfigError: The reference can't be run as configured.
        RunFailed: The reference failed.
        Stopped: A signal asked for it.
    """
    with _temporary_folder() as folder:
        entry = partial(record_references, plan.references, objects, folder, steps)
        config = next(iter(plan.references.values()))
        code = launch(entry, 1, config.launch, None, own_process=True, preload=imports_ahead(config)).show()
        _raise_if_stopped(code)
        if code:
            reason = folder / _REASON
            text = reason.read_text() if reason.exists() else ""
            if code == ConfigError.exit_code:
                raise ConfigError(f"the single-process reference can't be run: {text}")
            raise RunFailed(f"the single-process reference failed: {text or f'exit code {code}'}")
        notes = json.loads((folder / _NOTES).read_text())
        job = VerificationJob(folder, (), objects, steps, precision, tamper, show)
        rows: dict[int, Row] = {}
        for refused in plan.refused:
            rows[refused.case.number] = job.report(not_run(refused.case, "refused", refused.reason))
        for ranks in dict.fromkeys(case.ranks for case in plan.cases):
            rows |= _run_cases(replace(job, cases=tuple(case for case in plan.cases if case.ranks == ranks)))
    return [rows[number] for number in sorted(rows)], notes


@contextmanager
def _temporary_folder() -> Iterator[Path]:
    """Make a temporary folder; after a crash the logs of those ranks stay in it."""
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


def _run_cases(job: VerificationJob) -> dict[int, Row]:
    """Run all cases of one number of ranks, in as many launches as crashes require."""
    rows: dict[int, Row] = {}
    remaining = list(job.cases)
    while remaining:
        code = _launch_ranks(replace(job, cases=tuple(remaining)))
        for case in list(remaining):
            path = job.folder / f"{case.number}.json"
            if path.exists():
                rows[case.number] = Row(**json.loads(path.read_text()))
                remaining.remove(case)
        if remaining and code:
            _raise_if_stopped(code)
            crashed = remaining.pop(0)
            rows[crashed.number] = _crashed(job, crashed, code)
        elif remaining:
            raise RunFailed(f"the ranks ended without a result of {remaining[0].strategy}")
    return rows


def _launch_ranks(job: VerificationJob) -> int:
    first = job.cases[0]
    logs = job.folder / f"{_LOGS}{first.number}"
    try:
        entry, ahead = partial(_run_on_rank, job), imports_ahead(first.config)
        return launch(entry, first.ranks, first.config.launch, logs, own_process=True, preload=ahead).show()
    except ConfigError as refusal:
        for case in job.cases:
            job.save(case, not_run(case, "refused", str(refusal)))
        return 0


def _crashed(job: VerificationJob, case: Case, code: int) -> Row:
    (job.folder / _CRASHED).touch()
    messages = sorted(job.folder.glob(f"{case.number}.{_FAILED}-*"), key=lambda path: path.stat().st_mtime)
    reason = messages[0].read_text() if messages else f"a rank ended with exit code {code} and without a message"
    return job.report(not_run(case, "refused" if code == ConfigError.exit_code else "crashed", reason))


def _raise_if_stopped(code: int) -> None:
    if code in (Stopped.exit_code, Paused.exit_code):
        raise Stopped("stopped")


# --- on a rank ------------------------------------------------------------------------------------------------------


def record_references(references: Mapping[str, Config], objects: UserObjects, folder: Path, steps: int) -> int:
    """Record the reference of each optimizer in `folder`, on one rank."""
    from lockstep.distributed.process_group import joined
    from lockstep.proof.comparison import record_reference
    from lockstep.training.job import opened

    notes: list[str] = []
    try:
        with joined(next(iter(references.values())).launch, grouped=True):
            for name, config in references.items():
                with opened(config, _with_copied_model(objects)) as session:
                    notes = record_reference(session, folder / name, steps)
    except Failure as failure:
        (folder / _REASON).write_text(str(failure))
        raise
    (folder / _NOTES).write_text(json.dumps(notes))
    return 0


def _run_on_rank(job: VerificationJob) -> int:
    from lockstep.distributed.process_group import joined

    with joined(job.cases[0].config.launch, grouped=True) as world:
        for case in job.cases:
            row = run_case(job, case, world)
            if world.rank == 0:
                job.save(case, row)
    return 0


def run_case(job: VerificationJob, case: Case, world: World) -> Row:
    """Run a case on this rank. After a failure that all ranks share they can run the next; others are raised."""
    from lockstep.proof.comparison import RunComparison
    from lockstep.training.job import opened

    began = time.monotonic()
    tolerance = TOLERANCES[job.precision]
    comparison: RunComparison | None = None
    message = job.folder / f"{case.number}.{_FAILED}-{world.rank}"
    try:
        with opened(case.config, _with_copied_model(job.objects)) as session:
            comparison = RunComparison(session, job.folder / case.optimizer, job.steps, tolerance, case.optimizer)
            comparison.run(job.tamper)
    except Stopped:
        raise
    except Failure as failure:
        write_atomically(message, str(failure))
        if not _all_ranks_failed(job.folder, case, world.size):
            raise
        if isinstance(failure, ConfigError):
            return not_run(case, "refused", str(failure))
        if comparison is None:
            return not_run(case, "crashed", str(failure))
        comparison.evidence.failure = str(failure)
    except Exception as error:
        write_atomically(message, "".join(traceback.format_exception_only(error)).strip())
        raise
    return row_of(case, comparison.evidence, tolerance, time.monotonic() - began)


def _with_copied_model(objects: UserObjects) -> UserObjects:
    """Return the objects with a copy of the model: modules are trained in place."""
    from torch import nn

    return replace(objects, model=copy.deepcopy(objects.model)) if isinstance(objects.model, nn.Module) else objects


def _all_ranks_failed(folder: Path, case: Case, ranks: int) -> bool:
    """Return whether all ranks have failed in this case, so that none waits in a collective."""
    deadline = time.monotonic() + _FAILURE_WAIT_S
    while time.monotonic() < deadline:
        if all((folder / f"{case.number}.{_FAILED}-{rank}").exists() for rank in range(ranks)):
            return True
        time.sleep(0.01)
    return False
