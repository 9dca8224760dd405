"""Decides which updates are kept, and reports the others.

A spike is a loss or a gradient norm far above the ones before:

    limit = median + threshold x max(1.4826 x median absolute deviation, 1 % of the median)

Median and deviation are of the last `window` kept updates, renewed 16 times a window. The update just before doesn't
count: on an accelerator its numbers may not have arrived yet.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from lockstep.core.errors import ConfigError, Problem, RunFailed
from lockstep.core.failure_kinds import FailureKind
from lockstep.core.formatting import value
from lockstep.core.records import StepReport, Verdict

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.config.training_sections import BadNumbers

DISCARD_LIMIT = 100
UNLABELED_LIMIT = 10  # from a run's first update: a few samples may have no target
_NORMAL = 1.4826  # x the median absolute deviation is the standard deviation of a normal distribution
_LEAST = 0.01  # of the median: numbers that hardly vary have no spikes of a few permille
_RECENT = "recent"
_ARRIVED = 2  # the newest update that counts for update k is k - 2
_RENEWALS = 16  # of the limits while the window moves by its length
ADVICE = "most often a smaller learning rate, optim.clip_norm, or precision.compute bf16 or fp32 helps"


def is_finite(number: float | Tensor) -> bool | Tensor:
    """Return whether a number is finite, on its device; infinity minus itself is NaN."""
    return number - number == 0


def ranks_differ(step: int) -> str:
    """Return the message for a gradient that was not the same on all ranks after it was reduced."""
    why = "A hook that changes gradients on one rank does this, or a device that corrupts data"
    differ = f"step {step}: the ranks had different gradients after they were reduced, so their weights differ now"
    return f"{differ}. {why}; don't trust what this run has learned since step {step - 1}"


class NothingLearned(RunFailed):
    """The updates of a run, or all since long, were discarded."""

    kind = FailureKind.NOTHING_LEARNED


class NoTargets(ConfigError):
    """The updates of a run, or all since long, had no valid target."""


class Limits(NamedTuple):
    """The numbers above which an update is a spike."""

    loss: float = math.inf
    norm: float = math.inf

    def reason(self, loss: float, norm: float) -> str:
        """Return which number is above its limit, as text; empty if none is."""
        if loss > self.loss:
            return f"loss {value(loss)}, limit {value(self.loss)}"
        return f"gradient norm {value(norm)}, limit {value(self.norm)}" if norm > self.norm else ""


NO_LIMITS = Limits()


class Spikes:
    """The losses and gradient norms of the last kept updates, and the limits that follow from them."""

    def __init__(self, window: int, threshold: float) -> None:
        self._losses = _Recent(window, threshold)
        self._norms = _Recent(window, threshold)
        self._steps: deque[int] = deque(maxlen=window)
        self._waiting: deque[tuple[int, float, float]] = deque()
        self._renewed = max(1, window // _RENEWALS)
        self._limits = NO_LIMITS

    def limits(self, step: int) -> Limits:
        """Return the limits of update `step`, from the updates up to 2 before the one that renewed them."""
        newest = step - step % self._renewed - _ARRIVED
        if not self._waiting or self._waiting[0][0] > newest:
            return self._limits
        while self._waiting and self._waiting[0][0] <= newest:
            number, loss, norm = self._waiting.popleft()
            self._steps.append(number)
            self._losses.add(loss)
            self._norms.add(norm)
        self._limits = Limits(self._losses.limit(), self._norms.limit())
        return self._limits

    def see(self, step: int, loss: float, norm: float) -> None:
        """Add the numbers of a kept update."""
        self._waiting.append((step, loss, norm))

    def state(self) -> list[list[float]]:
        """Return [step, loss, norm] of the updates that count, or soon will."""
        counted = zip(self._steps, self._losses.numbers, self._norms.numbers, strict=True)
        return [[*numbers] for numbers in (*counted, *self._waiting)]

    def restore(self, state: Iterable[Iterable[float]]) -> None:
        """Continue from what `state` returned."""
        for recent in (self._losses, self._norms):
            recent.clear()
        self._steps.clear()
        self._limits = NO_LIMITS
        self._waiting = deque((int(step), loss, norm) for step, loss, norm in state)


class _Recent:
    """The last numbers of a series, by age and by size: adding one and the limit take 3 us together."""

    def __init__(self, window: int, threshold: float) -> None:
        self._window = window
        self._threshold = threshold
        self.numbers: deque[float] = deque()
        self._sorted: list[float] = []

    def clear(self) -> None:
        self.numbers.clear()
        self._sorted.clear()

    def add(self, number: float) -> None:
        if len(self.numbers) == self._window:
            del self._sorted[bisect_left(self._sorted, self.numbers.popleft())]
        self.numbers.append(number)
        insort(self._sorted, number)

    def limit(self) -> float:
        """Return the limit; infinity until the window is full."""
        if len(self.numbers) < self._window:
            return math.inf
        middle = self._window // 2
        median = self._sorted[middle]
        return median + self._threshold * max(_NORMAL * self._deviation(middle), _LEAST * abs(median))

    def _deviation(self, middle: int) -> float:
        numbers, median = self._sorted, self._sorted[middle]

        def reach(low: int) -> float:
            """Return the largest deviation of the numbers at `low` to `low` + `middle`."""
            return max(numbers[low + middle] - median, median - numbers[low])

        low, high = 0, self._window - 1 - middle
        while low < high:  # the first whose largest number is as far from the median as its smallest, or farther
            half = (low + high) // 2
            if numbers[half + middle] + numbers[half] < 2 * median:
                low = half + 1
            else:
                high = half
        return min(reach(low), reach(max(0, low - 1)))


class UpdateDecision(NamedTuple):
    """The decision about an update, on the device of its numbers; the same on all ranks.

    Attributes:
        limits: Above which it is a spike.
    """

    finite: bool | Tensor
    keep: bool | Tensor
    limits: Limits


class Verdicts:
    """Decides about the updates of a run.

    Args:
        scaled: Whether there is a loss scale, so that an overflow is expected now and then.
    """

    def __init__(self, section: BadNumbers, *, scaled: bool) -> None:
        self._section = section
        self._scaled = scaled
        left_out = 2 * section.rollback_steps if section.rolls_back else 0  # updates of samples without weight
        self._limit, self._unlabeled = max(DISCARD_LIMIT, left_out), max(UNLABELED_LIMIT, left_out)
        self.discarded = 0  # updates so far
        self._in_a_row = 0  # discarded, up to the last
        self._idle = 0  # in a row, discarded or without a valid target
        self._spikes = Spikes(section.window, section.threshold) if section.spike != "ignore" else None
        self._keeps_spikes = section.spike in ("ignore", "warn")

    def decide(
        self, step: int, loss_sum: float | Tensor, count: float | Tensor, norm: float | Tensor
    ) -> UpdateDecision:
        """Return whether an update is kept; on an accelerator the host doesn't wait to know.

        Args:
            step: Its number, from 1.
            norm: Of the gradient, unscaled.
        """
        finite = is_finite(norm + loss_sum)
        limits = NO_LIMITS if self._spikes is None else self._spikes.limits(step)
        if self._keeps_spikes or limits == NO_LIMITS:
            return UpdateDecision(finite, finite, limits)
        return UpdateDecision(finite, finite & (loss_sum / count <= limits.loss) & (norm <= limits.norm), limits)

    def see(
        self, step: int, loss: float, norm: float, limits: Limits, *, count: float, keep: bool
    ) -> tuple[Verdict, str]:
        """Receive an update's numbers, on the host; return its verdict, and what makes it a spike, if it is one."""
        finite = keep or is_finite(norm + loss)
        spike = limits.reason(loss, norm) if finite and (loss > limits.loss or norm > limits.norm) else ""
        verdict = Verdict.KEPT if keep else Verdict.SPIKE if finite else self._not_finite
        self.discarded += not keep
        self._in_a_row = 0 if keep else self._in_a_row + 1
        self._idle = 0 if keep and count else self._idle + 1
        if keep and self._spikes is not None and (loss or norm):  # else all its samples are left out
            self._spikes.see(step, loss, norm)
        return verdict, spike

    @property
    def _not_finite(self) -> Verdict:
        return Verdict.OVERFLOW if self._scaled else Verdict.NON_FINITE

    def answer(self, report: StepReport) -> str:
        """Return the config's policy for a bad update; empty for others, and an overflow under a loss scale."""
        if report.spike:
            return self._section.spike
        return self._section.nonfinite if report.verdict is Verdict.NON_FINITE else ""

    def refuse(self, report: StepReport, named: str = "") -> None:
        """Raise RunFailed or NoTargets at a limit, or for an update that the config doesn't tolerate.

        Args:
            named: Its numbers, and the samples that are suspected.
        """
        step = report.step
        if self.answer(report) == "stop":
            key, kind = ("spike", "a spike: ") if report.spike else ("nonfinite", "not finite: ")
            why = f"{kind}{named} (recovery.bad_numbers.{key}: stop); its update was discarded"
            raise RunFailed(f"step {step:,}: {why}", kind=FailureKind.BAD_NUMBERS)
        if self._in_a_row >= self._limit:
            spikes = "a spike of the loss or the gradient norm (recovery.bad_numbers)"
            what = spikes if report.verdict is Verdict.SPIKE else "a loss or gradient that was not finite"
            since = f"so the model has not changed since step {step - self._in_a_row}"
            text = f"step {step}: {self._in_a_row} updates in a row had {what}, {since}; {ADVICE}"
            raise RunFailed(text, kind=FailureKind.BAD_NUMBERS)
        if self._idle >= self._limit or (self._idle == step >= self._unlabeled and not self.discarded):
            self._refuse_idle(step)

    def refuse_untrained(self, step: int) -> None:
        """Raise NothingLearned or NoTargets for a run that ends without having learned in its second half."""
        if self._idle > 1 and 2 * self._idle >= step:
            self._refuse_idle(step)

    def _refuse_idle(self, step: int) -> None:
        which = f"all {step:,}" if self._idle == step else f"the last {self._idle:,} of {step:,}"
        if self._in_a_row < self._idle:
            why = "had no valid target: all labels are -100, or the texts are empty. Nothing was learned from them"
            raise NoTargets(Problem("", "data.train", f"{which} updates {why}; look at the labels of some samples"))
        has = "its initial weights" if self._idle == step else f"the weights of step {step - self._idle:,}"
        what = f"{which} updates had a loss or gradient that was not finite, and were discarded: nothing was learned"
        raise NothingLearned(f"{what}, and the model has {has}; {ADVICE}")

    def last_kept(self, step: int) -> int:
        """Return the last update that was kept, of those up to `step`."""
        return step - self._in_a_row

    def state(self) -> dict[str, Any]:
        state = {"discarded": self.discarded, "in_a_row": self._in_a_row, "idle": self._idle}
        return state if self._spikes is None else {**state, _RECENT: self._spikes.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned; a run that did not watch for spikes saved no recent numbers."""
        self.discarded, self._in_a_row, self._idle = state["discarded"], state["in_a_row"], state["idle"]
        if self._spikes is not None:
            self._spikes.restore(state.get(_RECENT, ()))
