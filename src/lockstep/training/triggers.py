"""When what a config asks for every so often is due: an evaluation, a save.

steps, samples, tokens, epochs    follow from the progress
minutes                           the first rank to reach them asks in the next vote, and all do it
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from lockstep.plan.schedule import is_due

if TYPE_CHECKING:
    from lockstep.config.every import Every
    from lockstep.core.progress import Progress
    from lockstep.core.records import Request, StepReport


class Trigger:
    """Args:
    every: None for never, unless a rank asks.
    request: how ranks ask each other for it.
    """

    def __init__(self, every: Every | None, request: Request, epoch_samples: int) -> None:
        self._every = every
        self._request = request
        self._epoch_samples = epoch_samples
        self.restart()

    def restart(self) -> None:
        """It was done: the minutes begin anew."""
        self._began = time.monotonic()

    def requests(self) -> tuple[Request, ...]:
        """What this rank asks for in the next vote."""
        every = self._every
        if every is None or every.unit != "minutes" or time.monotonic() - self._began < every.number * 60:
            return ()
        return (self._request,)

    def after(self, before: Progress, now: Progress, report: StepReport) -> bool:
        """Whether it follows the update between `before` and `now`."""
        if self._request in report.requests:
            return True
        every = self._every
        return every is not None and every.unit != "minutes" and is_due(every, before, now, self._epoch_samples)
