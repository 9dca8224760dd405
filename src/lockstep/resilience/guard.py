"""Checks an update before it is made: NaN, infinity and overflow are treated alike.

norm, loss --> finite? --> kept
                  no   --> discarded: parameters and optimizer state stay as they were, the data moves on
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.core.errors import ConfigError, RunFailed

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
