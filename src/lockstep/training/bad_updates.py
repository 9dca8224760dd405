"""Names the samples of updates whose numbers are bad, and does what the config asks for.

update 12: loss nan     each rank: the losses of its micro-batches --> gathered --> micro-batch 2 of rank 1: nan
                        its samples: message, events.jsonl         --> kept, discarded, rolled back, or the run ends

Ranks keep the losses of the last two updates as tensors, which costs nothing. They are read, and gathered, only once an
update is bad: its numbers come from the vote, so all ranks know.

A run that is rolled back goes to a state before the bad updates, and leaves their samples out:

update 52 is bad    rollback_steps 10: the samples of updates 43 to 52 are left out
kept states         30 ... 40 ... 50     the newest one before update 43 is that of step 40
RUN/logs            rollbacks.json       what all ranks do when they start again, under any launcher
step 40             updates 41 and 42 once more; then 43 to 52, without their samples

Samples that are left out have no weight; positions and learning rates stay. So the run ends as one that leaves out the
same samples by `data.leave_out`.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, cast

from lockstep.checkpoint.storage import names_by_step
from lockstep.core.errors import ConfigError, Failure, Problem, RolledBack, RunFailed
from lockstep.core.failure_kinds import FailureKind
from lockstep.core.files import MAX_JSON_BYTES, forget, read_bounded, write_atomically
from lockstep.core.formatting import listed, value
from lockstep.core.ranks import started_by_lockstep
from lockstep.core.records import NumbersReport, Verdict
from lockstep.data.bad_samples import BAD_NUMBERS
from lockstep.distributed.collectives import from_first_rank
from lockstep.distributed.user_collectives import print_once
from lockstep.monitor.folder import LOGS
from lockstep.resilience.verdicts import ADVICE
from lockstep.training.replicas import refuse_bad_state

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.config.training_sections import BadNumbers
    from lockstep.core.progress import Progress
    from lockstep.core.records import StepReport
    from lockstep.monitor.monitors import Monitors
    from lockstep.resilience.verdicts import Verdicts
    from lockstep.training.checkpoints import Checkpoints
    from lockstep.training.components import Components, FailureState
    from lockstep.training.left_out import LeftOutSamples
    from lockstep.training.resuming import Resume

_FAR = 3.0  # times the median of the others' mean losses
_MOST_PRINTED = 5  # bad updates of an attempt
_MOST_NAMED = 12  # samples in a message
_MOST_UNSEEN = 100  # records that nothing takes: a custom loop has no history
_MOST_RECORDED = 1_000  # samples in the history
_ACTIONS = {
    "warn": "kept", "skip": "discarded", "rollback": "rolled back", "stop": "stopped",
}  # fmt: skip
_FILE = "rollbacks.json"
_MOST_SAMPLES = 50_000  # of a window; each is listed in every later checkpoint


@dataclass(frozen=True, slots=True)
class _MicroBatch:
    """A micro-batch of a bad update: its mean loss, and, if it is the rank's worst, its samples."""

    rank: int
    number: int
    loss: float
    samples: tuple[int, ...]

    def __str__(self) -> str:
        return f"micro-batch {self.number + 1} of rank {self.rank} (mean loss {value(self.loss)})"


class BadUpdates:
    """The bad updates of an attempt.

    Attributes:
        verdicts: Which updates are kept.
    """

    def __init__(self, components: Components, verdicts: Verdicts, failure_state: FailureState) -> None:
        self._components = components
        self.verdicts = verdicts
        self._failure_state = failure_state
        self._losses: deque[tuple[Progress, list[Tensor]]] = deque(maxlen=2)  # an accelerator's reports come late
        self._unseen: deque[NumbersReport] = deque(maxlen=_MOST_UNSEEN)
        self._printed = 0

    def updated(self, before: Progress) -> None:
        """Keep the losses of the update that began at this progress."""
        self._losses.append((before, self._components.engine.losses))

    def receive(self, report: StepReport) -> None:
        """Name the samples of a bad update, and do what the config asks for; all ranks together.

        Raises:
            RunFailed: The run ends, or goes back (RollbackDue).
            ReplicasDiffer, StateNotFinite: The state makes it bad, not the samples.
        """
        if report.verdict is Verdict.KEPT and report.count and not report.spike:
            return
        answer = self.verdicts.answer(report)
        if answer in ("", "ignore"):
            self.verdicts.refuse(report)
            return
        knew, self._failure_state.fails_together = self._failure_state.fails_together, True  # if it fails here
        if not math.isfinite(report.loss):  # from the vote, so all ranks know
            refuse_bad_state(self._components, report.step, self.verdicts.last_kept(report.step))
        bad = self._named(report, _ACTIONS[answer])
        self._unseen.append(bad)
        text = _text(bad)
        if answer == "rollback":
            raise RollbackDue(f"step {report.step:,}: {text}", bad, report.samples)
        self.verdicts.refuse(report, text)
        self._failure_state.fails_together = knew
        if self._printed < _MOST_PRINTED:
            self._printed += 1
            last = "; further ones are in events.jsonl" if self._printed == _MOST_PRINTED else ""
            print_once(f"lockstep: update {report.step:,}, {bad.action}: {text}{last}")

    def take_new(self) -> list[NumbersReport]:
        """Return what became known since the last call."""
        new = [*self._unseen]
        self._unseen.clear()
        return new

    def _named(self, report: StepReport, action: str) -> NumbersReport:
        """Return the record of a bad update, with the micro-batch that makes it so, or else all of its samples."""
        what = report.spike or f"loss {value(report.loss)}, gradient norm {value(report.grad_norm)}"
        suspects = self._suspects(report)
        samples = [sample for part in suspects for sample in part.samples]
        if not suspects:
            first = report.samples - report.update_samples
            samples = self._components.loader.samples_between(first, report.samples)
        where = listed([str(part) for part in suspects], _MOST_NAMED) if suspects else ""
        return NumbersReport(
            report.step, report.step, what, action, tuple(dict.fromkeys(samples))[:_MOST_RECORDED], where
        )

    def _suspects(self, report: StepReport) -> list[_MicroBatch]:
        """Return the micro-batches of a bad update that are suspected.

        All ranks know that a loss is bad, which comes from the vote. Whether they agree on a norm, the next vote shows:
        there is no collective before.
        """
        axis = self._components.world.axis
        if axis.size > 1 and math.isfinite(report.loss) and not report.spike.startswith("loss "):
            return []
        gathered = cast("list[list[_MicroBatch]]", axis.gather(list(self._micro_batches(report))))
        return _suspects([part for parts in gathered for part in parts])

    def _micro_batches(self, report: StepReport) -> Iterator[_MicroBatch]:
        """Yield this rank's micro-batches of an update, where it knows their losses."""
        before, losses = next((kept for kept in self._losses if kept[0].steps == report.step - 1), (None, []))
        if before is None or not losses or not self._components.position.reports_loss:
            return
        samples = self._components.loader.own_samples(before)
        means = [loss.item() / len(own) if own else 0.0 for loss, own in zip(losses, samples, strict=True)]
        worst = max(means, key=_badness)
        for number, (mean, own) in enumerate(zip(means, samples, strict=True)):
            if own:
                named = own if _badness(mean) >= _badness(worst) else ()
                yield _MicroBatch(self._components.world.rank, number, mean, tuple(named))


def _text(bad: NumbersReport) -> str:
    if not bad.samples:
        return bad.what
    number = len(bad.samples)
    samples = f"sample{'s' * (number > 1)} {listed([str(sample) for sample in bad.samples], _MOST_NAMED)}"
    more = " (all in events.jsonl)" if number > _MOST_NAMED else ""
    return f"{bad.what}; suspected: {bad.where or 'the whole update'}, {samples}{more}"


def _badness(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def _suspects(parts: Sequence[_MicroBatch]) -> list[_MicroBatch]:
    """Return the micro-batches whose loss isn't finite, or far above the others'; none if that can't be known."""
    bad = [part for part in parts if not math.isfinite(part.loss)]
    if bad or len(parts) < 2:
        return bad if len(bad) < len(parts) else []
    worst = max(parts, key=lambda part: part.loss)
    others = median(part.loss for part in parts if part is not worst)
    return [worst] if worst.loss > _FAR * abs(others) else []


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


def refuse_large_window(section: BadNumbers, global_size: int) -> None:
    """Raise ConfigError if a rollback would leave out more samples than a checkpoint can list."""
    if section.rolls_back and section.rollback_steps * global_size > _MOST_SAMPLES:
        why = (
            f"{section.rollback_steps} updates of {global_size:,} samples are more than the {_MOST_SAMPLES:,} samples "
            f"that a rollback leaves out at most; write {max(1, _MOST_SAMPLES // global_size)}"
        )
        raise ConfigError(Problem("", "recovery.bad_numbers.rollback_steps", why))


# --- at the bad update, on all ranks ------------------------------------------------------------------------------


def recorded(due: RollbackDue, components: Components, checkpoints: Checkpoints) -> Failure:
    """Record that the run goes back, on the first rank; return the failure with which this attempt ends."""
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
        return RunFailed(_in_vain(due, times, steps), kind=FailureKind.BAD_NUMBERS)
    before = max(0, bad.update - steps)
    to = max((step for step in kept if step <= before), default=None)
    if to is None:  # better the oldest one after the window's begin than the beginning of the run
        to = min((step for step in kept if step < bad.update), default=0)
    first = components.loader.position_before(due.samples, bad.update - max(before, to))
    _write(run, [*earlier, Rollback(bad.update, to, first, due.samples, bad.what, bad.samples, bad.where)])
    begin = max(before, to) + 1
    updates = f"update {begin:,}" if begin == bad.update else f"updates {begin:,} to {bad.update:,}"
    hint = "" if started_by_lockstep(os.environ) else "; start it again, if nothing else does"
    return RolledBack(
        f"{due}; the run goes back to step {to:,}, and leaves out the {due.samples - first:,} samples of {updates}"
        f"{hint}"
    )


def _in_a_row(earlier: Sequence[Rollback], update: int, steps: int) -> int:
    times = 0
    for rollback in reversed(earlier):
        if update > rollback.update + steps:
            break
        times, update = times + 1, rollback.update
    return times


def _in_vain(due: RollbackDue, times: int, steps: int) -> str:
    if not times:
        return f"{due}; the run may not go back (recovery.budgets.rollback is 0); {ADVICE}"
    often = "once" if times == 1 else f"{times} times in a row"
    return (
        f"{due}; the run has gone back {often} without getting further than {steps:,} updates beyond, so it is hardly "
        f"the samples: {ADVICE}. recovery.budgets.rollback allows more"
    )


# --- when the run starts again ------------------------------------------------------------------------------------


def rollbacks_of(components: Components, run: Path, resume: Resume) -> tuple[list[Rollback], Resume]:
    """Return the rollbacks of the run that starts in a folder, and where it resumes; the same on all ranks.

    A run that starts over uses all samples, and one whose config has no rollback any more forgets what it hasn't done.

    Raises:
        RunFailed: The run's list of rollbacks can't be read.
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
    if rolls_back:
        return rollbacks
    done = [rollback for rollback in rollbacks if rollback.applied]
    if len(done) < len(rollbacks):
        _write(run, done)
    return []


def leave_out_windows(rollbacks: Iterable[Rollback], components: Components, left_out: LeftOutSamples) -> list[str]:
    """Leave the samples of rollbacks out from now on; return notes for the user."""
    notes = []
    for rollback in rollbacks:
        samples = components.loader.samples_between(rollback.first, rollback.last)
        reason = f"{BAD_NUMBERS}update {rollback.update:,} had {rollback.what}; the run went back"
        left_out.source.leave_out(dict.fromkeys(samples, reason))
        notes.append(
            f"{len(samples):,} samples are left out since update {rollback.update:,} had {rollback.what} "
            f"({LOGS}/{_FILE} in the run's folder)"
        )
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
            if not all(type(number) is int and 0 <= number < 2**62 for number in numbers):
                raise ValueError(numbers)
            if rollback.last - rollback.first > _MOST_SAMPLES:
                raise ValueError(f"more than {_MOST_SAMPLES:,} samples at once")
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
