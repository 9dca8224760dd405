"""Checks an update before it is made: NaN, infinity and overflow are treated alike.

norm, loss --> finite? --> kept
                  no   --> discarded: parameters and optimizer state stay as they were, the data moves on
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lockstep.core.errors import ConfigError, Problem, RunFailed
from lockstep.core.records import Verdict

if TYPE_CHECKING:
    from torch import Tensor

DISCARD_LIMIT = 100
UNLABELED_LIMIT = 10  # from a run's first update: a few samples may have no target
ADVICE = "a smaller learning rate, optim.clip_norm, or precision.compute bf16 or fp32 are what helps most often"


def is_finite(number: float | Tensor) -> bool | Tensor:
    """Return whether a number is neither NaN nor infinite, on its device; infinity minus itself is NaN."""
    return number - number == 0


def ranks_differ(step: int) -> str:
    """Return the message for a gradient that was not the same on all ranks after it was reduced."""
    return (
        f"step {step}: the ranks had different gradients after they were reduced, so their weights differ now. A hook "
        f"that changes gradients on one rank does this, or memory or a device that corrupts data; what this run has "
        f"learned since step {step - 1} is not to be trusted"
    )


class NothingLearned(RunFailed):
    """The updates of a run, or all since long, were discarded."""


class NoTargets(ConfigError):
    """The updates of a run, or all since long, had no valid target."""


class DiscardLimit:
    """Fails a run that no longer learns: after too many updates in a row that were discarded or had no valid target.

    Args:
        unlabeled: Updates after which a run that has seen no valid target yet fails.
    """

    def __init__(self, limit: int = DISCARD_LIMIT, unlabeled: int = UNLABELED_LIMIT) -> None:
        self._limit = limit
        self._unlabeled = unlabeled
        self._in_a_row = 0
        self._idle = 0  # in a row, discarded or without a valid target
        self._last = Verdict.KEPT
        self.discarded = 0

    def state(self) -> dict[str, int]:
        return {"discarded": self.discarded, "in_a_row": self._in_a_row, "idle": self._idle}

    def restore(self, state: Mapping[str, int]) -> None:
        self.discarded, self._in_a_row, self._idle = state["discarded"], state["in_a_row"], state["idle"]

    def see(self, verdict: Verdict, count: float) -> None:
        """Count an update with that many valid targets."""
        kept = verdict is Verdict.KEPT
        self._last = verdict
        self.discarded += not kept
        self._in_a_row = 0 if kept else self._in_a_row + 1
        self._idle = 0 if kept and count else self._idle + 1

    @property
    def in_a_row(self) -> int:
        """Updates in a row that were discarded, up to the last."""
        return self._in_a_row

    def refuse(self, step: int) -> None:
        """Raise RunFailed or NoTargets at the limit.

        Args:
            step: the last update counted.
        """
        if self._in_a_row < self._limit:
            if self._idle >= self._limit or (self._idle == step >= self._unlabeled and not self.discarded):
                self._refuse_idle(step)
            return
        spikes = "a spike of the loss or the gradient norm (recovery.bad_numbers)"
        what = spikes if self._last is Verdict.SPIKE else "a loss or gradient that was not finite"
        raise RunFailed(
            f"step {step}: {self._in_a_row} updates in a row had {what}, so the model has not changed since step "
            f"{step - self._in_a_row}; {ADVICE}"
        )

    def refuse_untrained(self, step: int) -> None:
        """Raise NothingLearned or NoTargets for a run that ends without having learned in its second half.

        Args:
            step: the run's last update.
        """
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
