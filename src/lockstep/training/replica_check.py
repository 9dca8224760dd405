"""Compares the copies of the training state that ranks hold: memory or a device may corrupt data without an error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lockstep.core.errors import ReplicasDiffer
from lockstep.training.replicas import CORRUPTED, difference
from lockstep.training.session import components_of

if TYPE_CHECKING:
    from lockstep.training.session import Session

_CAUSE = f"{CORRUPTED}; the checkpoints were compared before they were saved"


@dataclass(slots=True)
class ReplicaCheck:
    """Compares the replicas of a session's state.

    Attributes:
        every: Updates between two comparisons; None: none are compared.
    """

    session: Session
    every: int | None
    _compared_at: int = -1

    def follow(self) -> None:
        """Compare after the update that has ended, if that is scheduled; all ranks together."""
        if self.every is not None and self.session.progress.steps % self.every == 0:
            self.compare()

    def compare(self) -> None:
        """Compare now, before a save, unless that was done after this update; all ranks together.

        Raises:
            ReplicasDiffer: Copies of a part differ.
        """
        components, step = components_of(self.session), self.session.progress.steps
        if self.every is None or components.world.size == 1 or self._compared_at == step:
            return
        self._compared_at = step
        if (fault := difference(components)) is not None:
            raise ReplicasDiffer(f"step {step:,}: {fault.text}; {_CAUSE}", fault.ranks)
