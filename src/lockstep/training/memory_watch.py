"""Looks at how much memory this rank uses, and has blocks computed again once any rank uses too much.

    update 100: 0.83 of my memory > 0.8 --> request --> vote of update 101 --> every rank switches before update 102

The vote makes it the same on all ranks. Gradients are the same to the bit, so nothing of it belongs to a run's state.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.core.records import Request, StepReport

if TYPE_CHECKING:
    from lockstep.transforms.recomputing import Switch

_log = logging.getLogger("lockstep")


@dataclass(frozen=True, slots=True)
class MemoryWatch:
    """Attributes:
    switch: of the blocks.
    used: the share of its memory that this rank has used at most.
    threshold: what it may use.
    look_every: updates.
    speaks: this rank says so.
    """

    switch: Switch
    used: Callable[[], float]
    threshold: float
    look_every: int
    speaks: bool

    def requests(self, step: int) -> tuple[Request, ...]:
        """What this rank asks for, after so many updates, in the next vote."""
        if self.switch.on or step % self.look_every or self.used() <= self.threshold:
            return ()
        return (Request.SAVE_MEMORY,)

    def hear(self, report: StepReport) -> None:
        """Between two updates."""
        if Request.SAVE_MEMORY not in report.requests or self.switch.on:
            return
        self.switch.on = True
        if self.speaks:
            _log.warning(
                "memory.activation_checkpointing: a rank has used more than %.0f %% of its memory by update %d: "
                "activations are computed again from here on",
                100 * self.threshold,
                report.step,
            )
