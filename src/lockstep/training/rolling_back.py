"""Lets a run go back before updates whose numbers are bad, and leave their samples out.

update 52 is bad    rollback_steps 10: the samples of updates 43 to 52 are left out
kept states         30 ... 40 ... 50     the newest one before update 43 is that of step 40
RUN/logs            rollbacks.json       what all ranks do when they start again, under any launcher
step 40             updates 41 and 42 once more; then 43 to 52, without their samples

Samples that are left out have no weight; positions and learning rates stay. So the run ends as one that leaves out the
same samples by `data.leave_out`. The numbers that decide come from the vote, and the file is read by the first rank:
all ranks do the same.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lockstep.checkpoint.storage import names_by_step
from lockstep.core.errors import ConfigError, Failure, Problem, RolledBack, RunFailed
from lockstep.core.files import MAX_JSON_BYTES, forget, read_bounded, write_atomically
from lockstep.core.ranks import started_by_lockstep
from lockstep.core.records import NumbersReport
from lockstep.data.bad_samples import BAD_NUMBERS, WENT_BACK
from lockstep.monitor.folder import LOGS
from lockstep.resilience.guard import ADVICE

if TYPE_CHECKING:
    from lockstep.config.numbers_sections import BadNumbers
    from lockstep.core.progress import Progress
    from lockstep.monitor.monitors import Monitors
    from lockstep.training.checkpoints import Checkpoints
    from lockstep.training.components import Components
    from lockstep.training.left_out import LeftOutSamples
    from lockstep.training.resuming import Resume

_FILE = "rollbacks.json"
_MOST_SAMPLES = 50_000  # of a window; each is listed in every later checkpoint


class RollbackDue(RunFailed):
    """An update is bad, and the config asks to go back.

    Attributes:
        bad: The update.
        samples: Consumed with it.
    """

    def __init__(self, message: str, bad: NumbersReport, samples: int) -> None:
        super().__init__(message)
        self.bad = bad
        self.samples = samples


@dataclass(frozen=True, slots=True)
class Rollback:
    """A rollback of a run.

    Attributes:
        update: The bad update.
        to: Step of the state to which the run goes back, or an earlier one.
        first, last: Positions of the samples that are left out; `last` is exclusive.
        applied: Whether the run has started again since.
        what, samples, where: Of the bad update, see `NumbersReport`.
    """

    update: int
    to: int
    first: int
    last: int
    what: str
    samples: tuple[int, ...] = ()
    where: str = ""
    applied: bool = False

    @property
    def reason(self) -> str:
        """The reason for which the samples are left out."""
        return f"{BAD_NUMBERS}update {self.update:,} had {self.what}{WENT_BACK}"


def refuse_large_window(section: BadNumbers, global_size: int) -> None:
    """Raise ConfigError if a rollback would leave out more samples than a checkpoint can list."""
    if section.rolls_back and section.rollback_steps * global_size > _MOST_SAMPLES:
        why = (
            f"{section.rollback_steps} updates of {global_size:,} samples are more than the {_MOST_SAMPLES:,} samples "
            f"that a rollback leaves out at most; write {max(1, _MOST_SAMPLES // global_size)}"
        )
        raise ConfigError(Problem("", "recovery.bad_numbers.rollback_steps", why))


# --- at the bad update, on all ranks ----------------------------------------------------------------------------------


def recorded(due: RollbackDue, components: Components, checkpoints: Checkpoints) -> Failure:
    """Record that the run goes back, on the first rank; return the failure with which this attempt ends."""
    checkpoints.finish()  # a save in progress exists then
    checkpoints.snapshots.finish()
    components.world.axis.barrier()
    resumable = checkpoints.snapshots.resumable(checkpoints.storage)  # several hosts find out together
    run, outcome = checkpoints.home, cast("Failure | None", None)
    assert run is not None, "a session under a custom loop doesn't roll back"
    if components.world.rank == 0:
        try:
            outcome = _recorded(due, components, [*names_by_step(resumable.names())], run)
        except OSError as error:
            where = run / LOGS / _FILE
            outcome = RunFailed(f"{due}; the run can't go back: {where} can't be written: {error.strerror or error}")
    return cast("Failure", components.world.axis.broadcast(outcome))


def _recorded(due: RollbackDue, components: Components, kept: Sequence[int], run: Path) -> Failure:
    recovery, bad = components.config.recovery, due.bad
    steps, earlier = recovery.bad_numbers.rollback_steps, rollbacks_in(run)
    times, budget = _in_a_row(earlier, bad.update, steps), recovery.budget("rollback")
    if times >= budget:
        return RunFailed(_in_vain(due, times, steps, run))
    before = max(0, bad.update - steps)
    to = max((step for step in kept if step <= before), default=None)
    if to is None:  # better the oldest one after the window's begin than the beginning of the run
        to = min((step for step in kept if step < bad.update), default=0)
    first = components.loader.position_before(due.samples, bad.update - max(before, to))
    rollback = Rollback(bad.update, to, first, due.samples, bad.what, bad.samples, bad.where)
    _write(run, [*earlier, rollback])
    begin = max(before, to) + 1
    updates = f"update {begin:,}" if begin == bad.update else f"updates {begin:,} to {bad.update:,}"
    hint = "" if started_by_lockstep(os.environ) else "; start it again, if nothing else does"
    return RolledBack(
        f"{due}; the run goes back to step {to:,}, and leaves out the {due.samples - first:,} samples of {updates}"
        f"{hint}"
    )


def _in_a_row(earlier: Iterable[Rollback], update: int, steps: int) -> int:
    """Return how many rollbacks there were since the run has got further than `steps` updates beyond one."""
    times = 0
    for rollback in reversed([*earlier]):
        if update > rollback.update + steps:
            break
        times, update = times + 1, rollback.update
    return times


def _in_vain(due: RollbackDue, times: int, steps: int, run: Path) -> str:
    if not times:
        return f"{due}; the run may not go back (recovery.budgets.rollback is 0); {ADVICE}"
    often = "once" if times == 1 else f"{times} times in a row"
    return (
        f"{due}; the run has gone back {often} without getting further than {steps:,} updates beyond, so it is hardly "
        f"the samples: {ADVICE}. recovery.budgets.rollback allows more; delete {run / LOGS / _FILE} to use the samples "
        "that are left out again"
    )


# --- when the run starts again ----------------------------------------------------------------------------------------


def rollbacks_of(components: Components, run: Path, resume: Resume) -> tuple[list[Rollback], Resume]:
    """Return the rollbacks of the run that starts in a folder, and where it resumes; the same on all ranks.

    A run that starts over uses all samples, and one whose config has no rollback any more forgets what it hasn't done.

    Raises:
        RunFailed: The run's list of rollbacks can't be read.
    """
    rolls_back = components.config.recovery.bad_numbers.rolls_back
    known: list[Rollback] | Failure = []
    if components.world.rank == 0 and resume.origin is None:
        try:
            known = _known(run, fresh=resume.fresh, rolls_back=rolls_back)
        except Failure as failure:
            known = failure
    known = cast("list[Rollback] | Failure", components.world.axis.broadcast(known))
    if isinstance(known, Failure):
        raise known
    until = min((rollback.to for rollback in known if not rollback.applied), default=None)
    return known, replace(resume, until=until) if resume.step is None else resume


def _known(run: Path, *, fresh: bool, rolls_back: bool) -> list[Rollback]:
    if fresh:
        forget(run / LOGS / _FILE)
        return []
    rollbacks = rollbacks_in(run)
    if rolls_back:
        return rollbacks
    done = [rollback for rollback in rollbacks if rollback.applied]
    if len(done) < len(rollbacks):
        _write(run, done)
    return []


def apply(rollbacks: Iterable[Rollback], components: Components, left_out: LeftOutSamples) -> list[str]:
    """Leave the samples of rollbacks out from now on; return notes for the user."""
    notes = []
    for rollback in rollbacks:
        samples = components.loader.samples_between(rollback.first, rollback.last)
        left_out.source.leave_out(dict.fromkeys(samples, rollback.reason))
        notes.append(
            f"{len(samples):,} samples are left out since update {rollback.update:,} had {rollback.what} "
            f"({LOGS}/{_FILE} in the run's folder)"
        )
    return notes


def report(rollbacks: Sequence[Rollback], monitors: Monitors, progress: Progress, run: Path) -> None:
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


# --- the file ---------------------------------------------------------------------------------------------------------


def rollbacks_in(run: Path) -> list[Rollback]:
    """Return the rollbacks of the run in a folder. Raises RunFailed if its file can't be read."""
    file = run / LOGS / _FILE
    try:
        content = read_bounded(file, MAX_JSON_BYTES)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise RunFailed(f"{file} can't be read: {error.strerror or error}") from error
    try:
        read = [Rollback(**{**fields, "samples": tuple(fields["samples"])}) for fields in json.loads(content)]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise RunFailed(f"{file} is damaged ({error}); delete it to use the samples that it leaves out") from error
    for rollback in read:
        numbers = (rollback.update, rollback.to, rollback.first, rollback.last)
        if not all(type(number) is int and 0 <= number < 2**62 for number in numbers):
            raise RunFailed(f"{file} is damaged ({numbers}); delete it to use the samples that it leaves out")
        if rollback.last - rollback.first > _MOST_SAMPLES:
            raise RunFailed(f"{file} leaves out more than {_MOST_SAMPLES:,} samples at once; delete it to use them")
    return read


def _write(run: Path, rollbacks: Iterable[Rollback]) -> None:
    write_atomically(run / LOGS / _FILE, json.dumps([asdict(rollback) for rollback in rollbacks], indent=1) + "\n")
