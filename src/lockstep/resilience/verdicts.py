"""Decides which updates are kept, and what is reported of those that are not.

loss, gradient norm --> finite? --> no spike? --> kept
                          no          yes, and the config discards spikes   --> discarded
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.core.errors import RunFailed
from lockstep.core.records import StepReport, Verdict
from lockstep.resilience.guard import DISCARD_LIMIT, UNLABELED_LIMIT, DiscardLimit, is_finite
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
        self._discards = DiscardLimit(max(DISCARD_LIMIT, left_out), max(UNLABELED_LIMIT, left_out))
        self._spikes = Spikes(section.window, section.threshold) if section.spike != "ignore" else None
        self._keeps_spikes = section.spike in ("ignore", "warn")

    @property
    def discarded(self) -> int:
        """Number of updates discarded so far."""
        return self._discards.discarded

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
        finite = is_finite(norm + loss)
        spike = limits.reason(loss, norm) if finite else ""
        verdict = Verdict.KEPT if keep else Verdict.SPIKE if finite else self._not_finite
        self._discards.see(verdict, count)
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
        """Raise RunFailed at the discard limit, or for an update that the config doesn't tolerate.

        Args:
            named: Its numbers, and the samples that are suspected.
        """
        if self.answer(report) == "stop":
            key, kind = ("spike", "a spike: ") if report.spike else ("nonfinite", "not finite: ")
            raise RunFailed(
                f"step {report.step:,}: {kind}{named} (recovery.bad_numbers.{key}: stop); its update was discarded"
            )
        self._discards.refuse(report.step)

    def refuse_untrained(self, step: int) -> None:
        """Raise NothingLearned or NoTargets if the run, whose last update this is, has learned nothing for long."""
        self._discards.refuse_untrained(step)

    def last_kept(self, step: int) -> int:
        """Return the last update that was kept, of those up to `step`."""
        return step - self._discards.in_a_row

    def state(self) -> dict[str, Any]:
        state: dict[str, Any] = self._discards.state()
        return state if self._spikes is None else {**state, _RECENT: self._spikes.state()}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from what `state` returned; earlier versions saved no recent numbers."""
        self._discards.restore(state)
        if self._spikes is not None:
            self._spikes.restore(state.get(_RECENT, ()))
