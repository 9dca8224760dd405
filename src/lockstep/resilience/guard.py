"""Checks an update before it is made: NaN, infinity and overflow are treated alike.

norm, loss --> finite? --> kept
                  no   --> discarded: parameters and optimizer state stay as they were, the data moves on
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from lockstep.core.errors import RunFailed
from lockstep.core.records import Verdict

if TYPE_CHECKING:
    from torch import Tensor

DISCARD_LIMIT = 100
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


class DiscardLimit:
    """Fails a run after too many discarded updates in a row: such a run no longer learns."""

    def __init__(self, limit: int = DISCARD_LIMIT) -> None:
        self._limit = limit
        self._in_a_row = 0
        self._last = Verdict.KEPT
        self.discarded = 0

    def state(self) -> dict[str, int]:
        return {"discarded": self.discarded, "in_a_row": self._in_a_row}

    def restore(self, state: Mapping[str, int]) -> None:
        self.discarded, self._in_a_row = state["discarded"], state["in_a_row"]

    def see(self, verdict: Verdict) -> None:
        """Count an update."""
        kept = verdict is Verdict.KEPT
        self._last = verdict
        self.discarded += not kept
        self._in_a_row = 0 if kept else self._in_a_row + 1

    def refuse(self, step: int) -> None:
        """Raise RunFailed at the limit.

        Args:
            step: the last update counted.
        """
        if self._in_a_row < self._limit:
            return
        spikes = "a spike of the loss or the gradient norm (recovery.bad_numbers)"
        what = spikes if self._last is Verdict.SPIKE else "a loss or gradient that was not finite"
        raise RunFailed(
            f"step {step}: {self._in_a_row} updates in a row had {what}, so the model has not changed since step "
            f"{step - self._in_a_row}; {ADVICE}"
        )
