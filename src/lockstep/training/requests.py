"""Requests by the clock for an evaluation or a save: rank 0 makes them, and all ranks act after the same update.

Intervals in steps, samples, tokens and epochs need no request: they follow from the progress, which all ranks share.
"""

from __future__ import annotations

import math
import time
from collections.abc import Collection
from typing import TYPE_CHECKING

from lockstep.core.records import Request
from lockstep.plan.schedule import is_due, updates_until

if TYPE_CHECKING:
    from lockstep.config.every import Every
    from lockstep.core.progress import Progress

_LOST_AFTER = 16  # looks at the clock; a request that isn't followed by then was lost with its vote


class OpenRequest:
    """A request by the clock, made once until it is followed: votes, and on GPUs their results, come an update late."""

    def __init__(self) -> None:
        self.looks_left = 0

    def is_made(self, *, due: bool) -> bool:
        """Return whether to make it now; called at each look at the clock."""
        self.looks_left = max(0, self.looks_left - 1)
        if not due or self.looks_left:
            return False
        self.looks_left = _LOST_AFTER
        return True

    def close(self) -> None:
        """Note that it was followed, or refused."""
        self.looks_left = 0


class Trigger:
    """Decides which updates an evaluation or a save follows; without `every`, only after requested ones."""

    def __init__(self, every: Every | None, request: Request, epoch_samples: int, rank: int) -> None:
        self._every = every
        self._request = request
        self._epoch_samples = epoch_samples
        self._seconds = every.number * 60 if rank == 0 and every is not None and every.unit == "minutes" else math.inf
        self._open = OpenRequest()
        self.restart()

    def restart(self) -> None:
        """Count minutes from now on, because it was done."""
        self._began = time.monotonic()
        self._open.close()

    def requests(self) -> tuple[Request, ...]:
        """Return this rank's request for the next vote, if its minutes are over; called at each look at the clock."""
        if self._seconds == math.inf:
            return ()
        is_due = time.monotonic() - self._began >= self._seconds
        is_asked = (is_due or self._open.looks_left) and self._open.is_made(due=is_due)
        return (self._request,) if is_asked else ()

    def follows(self, before: Progress, now: Progress, requests: Collection[Request] = ()) -> bool:
        """Return whether it follows the update between `before` and `now`, or was requested of all ranks."""
        if self._request in requests:
            return True
        every = self._every
        return every is not None and every.unit != "minutes" and is_due(every, before, now, self._epoch_samples)

    def updates_left(self, now: Progress, most: int) -> float:
        """Return how many further updates of at most `most` samples it takes at least until it follows one."""
        return math.inf if self._every is None else updates_until(self._every, now, self._epoch_samples, most)
