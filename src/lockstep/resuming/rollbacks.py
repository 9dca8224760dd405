"""Rollbacks: a run goes back to a state before bad updates, and leaves their samples out.

    update 52 is bad    rollback_steps 10: the samples of updates 43 to 52 are left out
    kept states         30 ... 40 ... 50     the newest one before update 43 is of step 40
    RUN/logs            rollbacks.json       what all ranks do when they start again, under any launcher
    step 40             updates 41 and 42 once more; then 43 to 52, without their samples

Samples that are left out have no weight; positions and learning rates stay: the run ends as one that leaves out the
same samples by `data.leave_out`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.checkpoint.storage import names_by_step
from lockstep.core.errors import Failure, RolledBack, RunFailed
from lockstep.core.failure_kinds import FailureKind
from lockstep.core.files import MAX_JSON_BYTES, forget, read_bounded, write_atomically
from lockstep.core.ranks import started_by_lockstep
from lockstep.core.records import NumbersReport
from lockstep.data.bad_samples import BAD_NUMBERS
from lockstep.distributed.collectives import from_first_rank
from lockstep.loop.bad_updates import MOST_SAMPLES, RollbackDue
from lockstep.monitor.folder import LOGS
from lockstep.resilience.verdicts import ADVICE

if TYPE_CHECKING:
    from lockstep.core.progress import Progress
    from lockstep.loop.components import Components
    from lockstep.loop.left_out import LeftOutSamples
    from lockstep.monitor.monitors import Monitors
    from lockstep.resuming.checkpoints import Checkpoints
    from lockstep.resuming.resuming import Resume

_FILE = "rollbacks.json"


@dataclass(frozen=True, slots=True)
class Rollback:
    """A rollback of a run.

    Attributes:
        update: The bad update.
        to: Step of the state that the run goes back to, or an earlier one.
        first, last: Positions of the samples that are left out; `last` is exclusive.
        what, samples, where: See `NumbersReport`.
        applied: Whether the run has started again since.
    """

    update: int
    to: int
    first: int
    last: int
    what: str
    samples: tuple[int, ...] = ()
    where: str = ""
    applied: bool = False


def recorded(due: RollbackDue, components: Components, checkpoints: Checkpoints) -> Failure:
    """Record that the run goes back, on the first rank; return the failure that ends this attempt."""
    checkpoints.finish()  # a save in progress exists then
    checkpoints.snapshots.finish()
    components.world.axis.barrier()
    resumable = checkpoints.snapshots.resumable(checkpoints.storage)  # several hosts find out together
    run = checkpoints.home
    assert run is not None, "a session under a custom loop doesn't roll back"
    try:
        return from_first_rank(
            components.world.axis, lambda: _recorded(due, components, [*names_by_step(resumable.names())], run)
        )
    except Failure as failure:
        return failure


def _recorded(due: RollbackDue, components: Components, kept: Sequence[int], run: Path) -> Failure:
    recovery, bad = components.config.recovery, due.bad
    steps, earlier = recovery.bad_numbers.rollback_steps, rollbacks_in(run)
    times = _in_a_row(earlier, bad.update, steps)
    if times >= recovery.budget("rollback"):
        why = f"the run has gone back {times} times in a row without getting past it (recovery.budgets.rollback)"
        return RunFailed(f"{due}; {why}: {ADVICE}", kind=FailureKind.BAD_NUMBERS)
    before = max(0, bad.update - steps)
    to = max((step for step in kept if step <= before), default=None)
    if to is None:  # better the oldest one after the window's begin than the beginning of the run
        to = min((step for step in kept if step < bad.update), default=0)
    begin = max(before, to)
    first = components.loader.position_before(due.samples, bad.update - begin)
    _write(run, [*earlier, Rollback(bad.update, to, first, due.samples, bad.what, bad.samples, bad.where)])
    hint = "" if started_by_lockstep(os.environ) else "; start it again, if nothing else does"
    return RolledBack(
        f"{due}; the run goes back to step {to:,}, and leaves out the {due.samples - first:,} samples of updates "
        f"{begin + 1:,} to {bad.update:,}{hint}"
    )


def _in_a_row(earlier: Sequence[Rollback], update: int, steps: int) -> int:
    times = 0
    for rollback in reversed(earlier):
        if update > rollback.update + steps:
            break
        times, update = times + 1, rollback.update
    return times


# --- when the run starts again ------------------------------------------------------------------------------------


def rollbacks_of(components: Components, run: Path, resume: Resume) -> tuple[list[Rollback], Resume]:
    """Return the rollbacks of the run that starts in a folder, and where it resumes; the same on all ranks.

    A run that starts over uses all samples. One with no rollback in its config any more forgets those not yet applied.
    Raises RunFailed if the run's list of rollbacks can't be read.
    """
    rolls_back = components.config.recovery.bad_numbers.rolls_back
    if resume.origin is not None:
        return [], resume
    known = from_first_rank(components.world.axis, partial(_known, run, fresh=resume.fresh, rolls_back=rolls_back))
    until = min((rollback.to for rollback in known if not rollback.applied), default=None)
    return known, replace(resume, until=until) if resume.step is None else resume


def _known(run: Path, *, fresh: bool, rolls_back: bool) -> list[Rollback]:
    if fresh:
        forget(run / LOGS / _FILE)
        return []
    rollbacks = rollbacks_in(run)
    if not rolls_back and any(not rollback.applied for rollback in rollbacks):
        _write(run, [rollback for rollback in rollbacks if rollback.applied])
    return rollbacks if rolls_back else []


def leave_out_windows(rollbacks: Iterable[Rollback], components: Components, left_out: LeftOutSamples) -> list[str]:
    """Leave the samples of rollbacks out from now on; return notes for the user."""
    notes = []
    for rollback in rollbacks:
        samples = components.loader.samples_between(rollback.first, rollback.last)
        bad = f"update {rollback.update:,} had {rollback.what}"
        left_out.source.leave_out(dict.fromkeys(samples, f"{BAD_NUMBERS}{bad}; the run went back"))
        notes.append(f"{len(samples):,} samples are left out since {bad} ({LOGS}/{_FILE} in the run's folder)")
    return notes


def report_rollbacks(rollbacks: Sequence[Rollback], monitors: Monitors, progress: Progress, run: Path) -> None:
    """Record in the run's history, once, that it has gone back; on the first rank."""
    new = [rollback for rollback in rollbacks if not rollback.applied]
    for rollback in new:
        left_out = f"samples {rollback.first:,} to {rollback.last - 1:,} in the run's order are left out"
        where = f"{rollback.where}; {left_out}" if rollback.where else left_out
        monitors.bad_numbers(
            NumbersReport(progress.steps, rollback.update, rollback.what, "rolled back", rollback.samples, where)
        )
    if new:
        _write(run, [replace(rollback, applied=True) for rollback in rollbacks])


# --- the file -----------------------------------------------------------------------------------------------------


def rollbacks_in(run: Path) -> list[Rollback]:
    """Return the rollbacks of the run in a folder. Raises RunFailed if its file can't be read."""
    file = run / LOGS / _FILE
    try:
        read = [Rollback(**fields) for fields in json.loads(read_bounded(file, MAX_JSON_BYTES))]
        for rollback in read:
            numbers = (rollback.update, rollback.to, rollback.first, rollback.last)
            if min(numbers) < 0 or rollback.last - rollback.first > MOST_SAMPLES:
                raise ValueError(numbers)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunFailed(f"{file} can't be read: {error.strerror or error}") from error
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise RunFailed(f"{file} is damaged ({error}); delete it to use the samples that it leaves out") from error
    return [replace(rollback, samples=tuple(rollback.samples)) for rollback in read]


def _write(run: Path, rollbacks: Iterable[Rollback]) -> None:
    file = run / LOGS / _FILE
    try:
        write_atomically(file, json.dumps([asdict(rollback) for rollback in rollbacks], indent=1) + "\n")
    except OSError as error:
        raise RunFailed(f"the run can't go back: {file} can't be written: {error.strerror or error}") from error
