"""Reports the samples of updates with bad numbers, and does what the config asks for.

    update 12: loss nan     losses of all micro-batches, gathered --> micro-batch 2 of rank 1: its samples
                            --> message, events.jsonl --> kept, discarded, rolled back (`rollbacks`), or the run ends

Ranks keep the losses of the last two updates as tensors, and gather them only once an update is bad.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, cast

from lockstep.core.errors import ConfigError, Problem, RunFailed
from lockstep.core.formatting import counted, listed, value
from lockstep.core.records import NumbersReport
from lockstep.distributed.user_collectives import print_once
from lockstep.loop.replicas import refuse_bad_state

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.config.training_sections import BadNumbers
    from lockstep.core.progress import Progress
    from lockstep.core.records import StepReport
    from lockstep.loop.components import Components, FailureState
    from lockstep.resilience.verdicts import Verdicts

_FAR = 3.0  # times the median of the others' mean losses
_MOST_PRINTED = 5  # bad updates of an attempt
_MOST_NAMED = 12  # samples in a message
_MOST_UNSEEN = 100  # records that nothing takes: a custom loop has no history
_MOST_RECORDED = 1_000  # samples in the history
_ACTIONS = {"warn": "kept", "skip": "discarded", "rollback": "rolled back", "stop": "stopped"}
MOST_SAMPLES = 50_000
"""Samples that one rollback leaves out at most; each is listed in every later checkpoint."""


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
    """The bad updates of an attempt; `verdicts` decides which updates are kept.

    Attributes:
        losses: Of the micro-batches of updates, by the progress before each.
        unseen: What became known, and `take_new` hasn't returned.
    """

    def __init__(self, components: Components, verdicts: Verdicts, failure_state: FailureState) -> None:
        self._components = components
        self.verdicts = verdicts
        self._failure_state = failure_state
        self.losses: deque[tuple[Progress, list[Tensor]]] = deque(maxlen=2)  # an accelerator's reports come late
        self.unseen: deque[NumbersReport] = deque(maxlen=_MOST_UNSEEN)
        self._printed = 0

    def receive(self, report: StepReport) -> None:
        """Report the samples of a bad update, and do what the config asks for; all ranks together.

        Raises RunFailed if the run ends, or goes back (RollbackDue).
        """
        answer = self.verdicts.answer(report)
        if answer in ("", "ignore"):
            self.verdicts.refuse(report)
            return
        knew, self._failure_state.fails_together = self._failure_state.fails_together, True  # if it fails here
        if not math.isfinite(report.loss):  # from the vote, so all ranks know
            refuse_bad_state(self._components, report.step, self.verdicts.last_kept(report.step))
        bad = self._named(report, _ACTIONS[answer])
        self.unseen.append(bad)
        text = _text(bad)
        if answer == "rollback":
            raise RollbackDue(f"step {report.step:,}: {text}", bad, report.samples)
        self.verdicts.refuse(report, text)
        self._failure_state.fails_together = knew
        if self._printed < _MOST_PRINTED:
            self._printed += 1
            print_once(f"lockstep: update {report.step:,}, {bad.action}: {text}")

    def take_new(self) -> list[NumbersReport]:
        """Return what became known since the last call."""
        new = [*self.unseen]
        self.unseen.clear()
        return new

    def _named(self, report: StepReport, action: str) -> NumbersReport:
        """Return the record of a bad update, with the micro-batch that makes it so, or else all of its samples."""
        what = report.spike or f"loss {value(report.loss)}, gradient norm {value(report.grad_norm)}"
        suspects = self._suspects(report)
        samples = [sample for part in suspects for sample in part.samples]
        if not suspects:
            samples = self._components.loader.samples_between(report.samples - report.update_samples, report.samples)
        where = listed([str(part) for part in suspects], _MOST_NAMED) if suspects else ""
        named = tuple(dict.fromkeys(samples))[:_MOST_RECORDED]
        return NumbersReport(report.step, report.step, what, action, named, where)

    def _suspects(self, report: StepReport) -> list[_MicroBatch]:
        """Return the suspected micro-batches; none if only a rank's norm is bad: the others may not know."""
        axis = self._components.world.axis
        if axis.size > 1 and math.isfinite(report.loss) and not report.spike.startswith("loss "):
            return []
        gathered = cast("list[list[_MicroBatch]]", axis.gather(list(self._micro_batches(report))))
        return _suspects([part for parts in gathered for part in parts])

    def _micro_batches(self, report: StepReport) -> Iterator[_MicroBatch]:
        before, losses = next((kept for kept in self.losses if kept[0].steps == report.step - 1), (None, []))
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
    samples = f"{counted(len(bad.samples), 'sample')}: {listed([str(sample) for sample in bad.samples], _MOST_NAMED)}"
    return f"{bad.what}; suspected: {bad.where or 'the whole update'}, {samples}"


def _badness(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def _suspects(parts: Sequence[_MicroBatch]) -> list[_MicroBatch]:
    """Return the micro-batches with a loss that isn't finite, or far above the others'; none if that can't be known."""
    bad = [part for part in parts if not math.isfinite(part.loss)]
    if bad or len(parts) < 2:
        return bad if len(bad) < len(parts) else []
    worst = max(parts, key=lambda part: part.loss)
    others = median(part.loss for part in parts if part is not worst)
    return [worst] if worst.loss > _FAR * abs(others) else []


class RollbackDue(RunFailed):
    """An update is bad, and the config asks to go back. `samples` were consumed with it."""

    def __init__(self, message: str, bad: NumbersReport, samples: int) -> None:
        super().__init__(message)
        self.bad = bad
        self.samples = samples


def refuse_large_window(section: BadNumbers, global_size: int) -> None:
    """Raise ConfigError if a rollback would leave out more samples than a checkpoint can list."""
    if section.rolls_back and section.rollback_steps * global_size > MOST_SAMPLES:
        least = max(1, MOST_SAMPLES // global_size)
        why = f"{section.rollback_steps} updates are more than a rollback's {MOST_SAMPLES:,} samples; write {least}"
        raise ConfigError(Problem("", "recovery.bad_numbers.rollback_steps", why))
