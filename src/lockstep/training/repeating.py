"""Repeats an update whose numbers are bad, from the same state: without the samples that make it so, or as it was.

    forward, backward, vote: NaN --> gradients, buffers, generators as before --> without the samples that are found
                                                                                  none is found: the same again
                                                                                  finite --> kept; NaN --> discarded

The samples of the next update have been fetched already; what that drew from a user's generator is not drawn again. An
overflow of fp16 under a loss scale comes again, and is not repeated. On an accelerator the host waits at each update
until it knows whether the update is bad.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, cast

from lockstep.core.errors import ConfigError, Problem
from lockstep.core.formatting import value
from lockstep.core.records import NumbersReport, Request
from lockstep.data.bad_samples import BAD_NUMBERS
from lockstep.distributed import generators
from lockstep.distributed.consensus import requests_in, with_next_counts, with_requests
from lockstep.monitor import metric_log
from lockstep.training.bad_updates import FOUND
from lockstep.training.valid_targets import nonzero_count, reported_counts

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.core.progress import Progress
    from lockstep.core.records import GlobalBatch
    from lockstep.distributed.consensus import VoteResult
    from lockstep.resilience.verdicts import UpdateDecision
    from lockstep.training.bad_updates import BadUpdates
    from lockstep.training.components import Components, FailureState
    from lockstep.training.left_out import LeftOutSamples

_MOST_GUILTY = 4  # samples; if there are more, it is hardly the samples

Compute = Callable[["GlobalBatch", "float | Tensor"], "UpdateAttempt"]
"""Accumulates a batch with a number of valid targets, and closes the vote."""


@dataclass(frozen=True, slots=True)
class UpdateAttempt:
    """An attempt at an update, up to its vote.

    Attributes:
        count: Valid targets, over all ranks.
        norm: Of the gradient, unscaled.
    """

    batch: GlobalBatch
    count: float | Tensor
    outcome: VoteResult
    norm: float | Tensor
    decision: UpdateDecision

    def numbers(self) -> tuple[float, float]:
        """Return loss and gradient norm; an accelerator is waited for."""
        return float(self.outcome.loss_sum / nonzero_count(self.count)), float(self.norm)

    def fault(self) -> str:
        """Return what is bad about its numbers; empty if nothing is."""
        loss, norm = self.numbers()
        if not math.isfinite(loss + norm):
            return f"loss {value(loss)}, gradient norm {value(norm)}"
        return self.decision.limits.reason(loss, norm)


class UpdateRepeats:
    """Repeats bad updates, if the config has `bisect`.

    Raises:
        ConfigError: The model's buffers are too large to be copied in every update, or samples can't be found.
    """

    def __init__(
        self, components: Components, failure_state: FailureState, left_out: LeftOutSamples, bad_updates: BadUpdates
    ) -> None:
        section = components.config.recovery.bad_numbers
        self.enabled = section.bisect
        self._section = section
        self._components = components
        self._state = failure_state
        self._left_out = left_out
        self._bad_updates = bad_updates
        self._restore: tuple[Callable[[], object], ...] = ()
        if not self.enabled:
            return
        if components.coupled is not None:
            why = f"true computes parts of an update, but {components.coupled}; write false"
            raise ConfigError(Problem("", "recovery.bad_numbers.bisect", why))
        model, copied = components.sharding.state.model, failure_state.buffers
        buffers = model.state_dict().keys() - {name for name, _ in model.named_parameters(remove_duplicate=False)}
        if too_large := sorted(buffers - (copied.names if copied is not None else frozenset())):
            why = f"true copies the model's buffers before each update, and {too_large[0]} is too large; leave it out"
            raise ConfigError(Problem("", "recovery.bad_numbers.bisect", why))

    def begin(self) -> None:
        """Copy what an attempt at the update that begins may change, beside gradients and buffers."""
        if self.enabled:
            self._restore = (
                partial(generators.put, generators.states(0), 0),
                metric_log.restore_point(),
                self._components.sharding.step.restore_point(),
            )

    def settled(
        self, attempt: UpdateAttempt, upcoming: GlobalBatch, progress: Progress, rate: float, compute: Compute
    ) -> tuple[UpdateAttempt, GlobalBatch]:
        """Return the attempt that counts, and the next update's batch; all ranks together.

        It is this attempt, unless it is bad and another one isn't.

        Args:
            upcoming: The next update's batch, as it was fetched.
            progress: Before the update.
            compute: Makes another attempt, after what this one has changed was undone.
        """
        if not self.enabled or not (fault := attempt.fault()) or self._is_overflow(attempt):
            return attempt, upcoming
        outcome = attempt.outcome
        slots = outcome.slots
        requests = requests_in(cast("list[float]", slots if isinstance(slots, list) else slots.tolist()))
        after = generators.states(0)

        def again(batch: GlobalBatch, count: float | Tensor) -> UpdateAttempt:
            self._undo(rate)
            return compute(batch, count)

        attempt, guilty = self._without_guilty(attempt, fault, progress, again)
        if guilty and Request.FAIL not in requests:  # else a rank has no data for the next update
            attempt, upcoming = self._next_without(guilty, attempt, upcoming, progress)
        requests |= {Request.LEFT_OUT} if guilty else set()
        generators.put(after, 0)
        return replace(attempt, outcome=with_requests(attempt.outcome, requests)), upcoming

    def _undo(self, rate: float) -> None:
        """Undo what an attempt has changed."""
        components = self._components
        components.sharding.step.update(rate, 1.0, False)
        self._state.undo_forward(components.sharding.state.model)
        for restore in self._restore:
            restore()
        self._state.accumulating = False  # nothing is left to undo

    def _is_overflow(self, attempt: UpdateAttempt) -> bool:
        return self._components.scaler.enabled and not bool(attempt.decision.finite)

    def _report(self, progress: Progress, fault: str, action: str, samples: Sequence[int] = ()) -> NumbersReport:
        step = progress.steps + 1
        return NumbersReport(step, step, fault, action, tuple(samples), FOUND if samples else "")

    # --- without the samples that make it bad -----------------------------------------------------------------------

    def _without_guilty(
        self, attempt: UpdateAttempt, fault: str, progress: Progress, again: Compute
    ) -> tuple[UpdateAttempt, list[int]]:
        """Return an attempt without the samples that make this one bad, and those samples.

        If there are none, or the config doesn't leave them out, the attempt is made once more as it was.
        """
        tokens = self._components.readback.tokens()
        search = _Search(
            self._components,
            self._left_out,
            attempt,
            progress,
            f"{BAD_NUMBERS}update {progress.steps + 1:,} had {fault}",
            again,
        )
        guilty, without = search.guilty()
        policy = self._section.nonfinite if not math.isfinite(sum(attempt.numbers())) else self._section.spike
        if without is None or policy in ("warn", "stop"):
            self._components.readback.start(tokens)
            attempt = again(attempt.batch, attempt.count)
            if attempt.fault():
                self._bad_updates.searched[progress.steps + 1] = guilty
            else:
                self._bad_updates.add(self._report(progress, fault, "repeated"))
            return attempt, []
        self._left_out.source.leave_out(dict.fromkeys(guilty, search.reason))
        known = {sample.index for sample in attempt.batch.left_out}
        new = tuple(sample for sample in without.batch.left_out if sample.index not in known)
        self._left_out.fetched(replace(without.batch, left_out=new))
        self._bad_updates.add(self._report(progress, fault, "left out", guilty))
        return without, guilty

    def _next_without(
        self, guilty: Sequence[int], attempt: UpdateAttempt, upcoming: GlobalBatch, progress: Progress
    ) -> tuple[UpdateAttempt, GlobalBatch]:
        """Return the attempt and the next update's batch, which is fetched again if it has guilty samples."""
        loader, after = self._components.loader, progress.advance(attempt.batch.samples, 0)
        if not {*guilty} & {*loader.samples_after(after)}:
            return attempt, upcoming
        upcoming = loader.again(after)
        count, tokens = _announced(self._components, upcoming)
        return replace(attempt, outcome=with_next_counts(attempt.outcome, count, tokens)), upcoming


def _announced(components: Components, batch: GlobalBatch) -> tuple[float | Tensor, float | Tensor]:
    """Return valid targets and tokens of an update over all ranks."""
    return components.consensus.announce(*reported_counts(batch, components.position))


@dataclass(frozen=True, slots=True)
class _Search:
    """The search for the samples that make an attempt bad; all ranks compute the same parts of the update.

    Attributes:
        reason: Why they are left out.
    """

    components: Components
    left_out: LeftOutSamples
    attempt: UpdateAttempt
    progress: Progress
    reason: str
    again: Compute

    def guilty(self) -> tuple[list[int], UpdateAttempt | None]:
        """Return the samples, and the attempt without them, which isn't bad; none if there is no such attempt."""
        lacked = self._lacked()
        rest = [sample for sample in self.components.loader.samples_after(self.progress) if sample not in lacked]
        loss, norm = self.attempt.numbers()
        finite, limits = math.isfinite(loss + norm), self.attempt.decision.limits

        def badness(samples: Sequence[int]) -> float:
            of_loss, of_norm = self._with(samples).numbers()
            if not math.isfinite(of_loss + of_norm):
                return math.inf
            return -1.0 if not finite else of_loss - limits.loss if loss > limits.loss else of_norm - limits.norm

        guilty: list[int] = []
        while rest and len(guilty) < _MOST_GUILTY:
            sample = _worst_sample(rest, badness, finite=finite)
            if sample is None:
                break
            guilty.append(sample)
            rest.remove(sample)
            without = self._with(rest)
            if not without.fault():
                return guilty, without
        return [], None

    def _lacked(self) -> set[int]:
        """Return the samples that the update lacks; a rank may not know yet what others can't read."""
        own = [sample.index for sample in self.attempt.batch.left_out]
        gathered = cast("list[list[int]]", self.components.world.axis.gather(own))
        return {index for of_rank in gathered for index in of_rank}

    def _with(self, samples: Sequence[int]) -> UpdateAttempt:
        """Compute the update with no other samples."""
        components, loader = self.components, self.components.loader
        others = {*loader.samples_after(self.progress)} - {*samples}
        with self.left_out.source.without(dict.fromkeys(others, self.reason)):
            part = loader.again(self.progress)
        count, tokens = _announced(components, part)
        components.readback.land()
        components.readback.start(int(tokens))
        return self.again(part, count)


def _worst_sample(samples: Sequence[int], badness: Callable[[Sequence[int]], float], *, finite: bool) -> int | None:
    """Return the sample that makes samples bad, by searching halves; None if the last one isn't bad alone.

    Args:
        badness: Computes a part of the samples; returns infinity if its numbers aren't finite, a number above 0 if they
            are bad.
        finite: Whether the numbers of all samples are finite: the half with the larger ones is searched then.
    """
    while len(samples) > 1:
        first, second = samples[: len(samples) // 2], samples[len(samples) // 2 :]
        of_first = badness(first)
        is_first = of_first >= badness(second) if finite else of_first == math.inf
        samples = first if is_first else second
    return samples[0] if samples and badness(samples) > 0 else None
