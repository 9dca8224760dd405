"""Decides which updates are kept, and what is reported of those that are not.

loss, gradient norm --> finite? --> no spike? --> kept
                          no          yes, and the config discards spikes   --> discarded
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.core.errors import Problem, RunFailed
from lockstep.core.records import StepReport, Verdict
from lockstep.resilience.guard import ADVICE, DISCARD_LIMIT, UNLABELED_LIMIT, NoTargets, NothingLearned, is_finite
from lockstep.resilience.spikes import NO_LIMITS, Limits, Spikes

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.config.numbers_sections import BadNumbers

_RECENT = "recent"


@dataclass(frozen=True, slots=True)
class UpdateDecision:
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
        left_out = 2 * section.rollback_steps if section.rolls_back else 0  # updates whose samples have no weight
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
        """Return what the config asks for after a bad update; empty for others, and an overflow under a loss scale."""
        if report.spike:
            return self._section.spike
        return self._section.nonfinite if report.verdict is Verdict.NON_FINITE else ""

    def refuse(self, report: StepReport, named: str = "") -> None:
        """Raise RunFailed or NoTargets at a limit, or for an update that the config doesn't tolerate.

        Args:
            named: Its numbers, and the samples that are suspected.
        """
        if self.answer(report) == "stop":
            key, kind = ("spike", "a spike: ") if report.spike else ("nonfinite", "not finite: ")
            raise RunFailed(
                f"step {report.step:,}: {kind}{named} (recovery.bad_numbers.{key}: stop); its update was discarded"
            )
        step = report.step
        if self._in_a_row >= self._limit:
            spikes = "a spike of the loss or the gradient norm (recovery.bad_numbers)"
            what = spikes if report.verdict is Verdict.SPIKE else "a loss or gradient that was not finite"
            raise RunFailed(
                f"step {step}: {self._in_a_row} updates in a row had {what}, so the model has not changed since step "
                f"{step - self._in_a_row}; {ADVICE}"
            )
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
        raise NothingLearned(
            f"{which} updates had a loss or gradient that was not finite, and were discarded: nothing was learned, and "
            f"the model has {has}; {ADVICE}"
        )

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
