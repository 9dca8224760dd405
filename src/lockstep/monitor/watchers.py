"""What the watchers of this room are, beyond `core.protocols.Monitor`: patient, and interested in more.

see(report) -> look                    the report of a step
next_look() -> (step, seconds)         don't show me anything before that step or that second
epoch(report), journal(step, logged)   what an epoch added up to; what user code logged
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

from lockstep.core.protocols import Monitor
from lockstep.monitor.journal import Logged


class Look(NamedTuple):
    """When a watcher wants the next report: at this step, or at this second of the run, whichever comes first."""

    step: float
    seconds: float


@dataclass(frozen=True, slots=True)
class EpochReport:
    """What one epoch added up to.

    Attributes:
        epoch: from 0.
        step: its last update.
        loss: mean over all valid targets of its kept updates; NaN if none was kept.
        samples: consumed by the run so far.
        seconds: since its first update began, evaluations in between included.
        whole: whether this process saw it from its first update on.
    """

    epoch: int
    step: int
    loss: float
    samples: int
    seconds: float
    whole: bool


class Watcher(Monitor, Protocol):
    """A monitor that needs only some of the reports. Discarded updates and the last one are shown to it always."""

    def next_look(self) -> Look:
        """Asked after each report it was shown."""

    def epoch(self, report: EpochReport) -> None: ...

    def journal(self, step: int, logged: Logged) -> None:
        """What user code logged up to and with update `step`, merged over all ranks."""
