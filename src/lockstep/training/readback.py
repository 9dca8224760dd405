"""The time at which the host reads the numbers of an update.

CPU            at once: they are on the host already
accelerator    update k is launched, then the numbers of update k - 1 are read: they have been ready for long, so the
               host doesn't wait and the accelerator never idles

Where something follows an update (an evaluation, a save, the end of the run, an error), `flush` reads its numbers at
once, so that no report is missing.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, NoReturn, cast

import torch

from lockstep.core.records import StepReport
from lockstep.distributed.consensus import NEXT_TOKENS, VoteResult

if TYPE_CHECKING:
    from torch import Tensor

Reporter = Callable[[list[float], float, bool, float, float], StepReport]
Rest = tuple["float | Tensor", "bool | Tensor", "float | Tensor", "float | Tensor"]
"""Norm of the gradient, unscaled; whether the update was kept; loss scale; the count by which the loss was divided."""


class PendingReport:
    """The report of an update, whose numbers may not have arrived from an accelerator yet."""

    __slots__ = ("_land", "_report")

    def __init__(self, land: Callable[[], None], report: StepReport | None = None) -> None:
        self._land = land
        self._report = report

    def arrive(self, report: StepReport) -> None:
        self._report = report

    def result(self) -> StepReport:
        """Return the report; wait until the device has finished the update."""
        if self._report is None:
            self._land()
        assert self._report is not None, "a later update reads the numbers of those before"
        return self._report

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"commit() returns a report that may still be on its way from the device, which has no {name!r}; "
            f"write commit().result().{name}"
        )


class Readback:
    """Reads the numbers of updates.

    Args:
        late: Whether they are on an accelerator, and are read an update later; also a CPU's, in tests.

    Attributes:
        late: That above.
    """

    def __init__(self, device: torch.device, *, late: bool) -> None:
        self.late = late
        self._device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._tokens = 0
        self._pending: tuple[Tensor, Any, Reporter, PendingReport] | None = None  # Any: the copy's event
        self._ready: StepReport | None = None
        self._delivered: StepReport | None = None

    def start(self, tokens: int) -> None:
        """Set the number of tokens of the first update."""
        self._tokens = tokens

    def tokens(self) -> int:
        """Return the number of tokens of the current update, over all ranks."""
        if self._pending is not None:
            self.land()
        return self._tokens

    def push(self, outcome: VoteResult, rest: Rest, reporter: Reporter) -> PendingReport:
        """Start reading an update's numbers; return its report."""
        if not self.late:
            self._tokens = int(outcome.next_tokens)
            report: Any = reporter  # all numbers are Python's
            self._delivered = report(outcome.slots, *rest)
            return PendingReport(self.land, self._delivered)
        self.land()
        self._delivered, self._ready = self._ready, None
        slots = cast("Tensor", outcome.slots)
        together = torch.cat([slots, *(self._number(value) for value in rest)])
        pending = PendingReport(self.land)
        self._pending = (*self._to_host(together), reporter, pending)
        return pending

    def arrived(self) -> StepReport | None:
        """Return the report that has arrived since the last call, without waiting for one."""
        report, self._delivered = self._delivered, None
        return report

    def flush(self) -> StepReport | None:
        """Return the report that hasn't arrived yet, if any."""
        self.land()
        ready, self._ready = self._ready, None
        return ready if self.late else self.arrived()

    def ready(self, seconds: float) -> bool:
        """Wait that long at most; return whether the numbers are there, so that `flush` returns at once."""
        event = self._pending[1] if self._pending is not None else None
        until = time.monotonic() + seconds
        while event is not None and not event.query():
            if time.monotonic() > until:
                return False
            time.sleep(0.001)
        return True

    def land(self) -> None:
        """Read the numbers that haven't arrived yet; `arrived` returns the same reports as without this call."""
        if self._pending is None:
            return
        numbers, event, reporter, pending = self._pending
        self._pending = None
        if event is not None:
            event.synchronize()
        *slots, norm, keep, scale, count = numbers.tolist()
        self._tokens = int(slots[NEXT_TOKENS])
        self._ready = reporter(slots, norm, bool(keep), scale, count)
        pending.arrive(self._ready)

    def _number(self, value: float | bool | Tensor) -> Tensor:
        if isinstance(value, torch.Tensor):
            return value.to(torch.float64).view(1)
        return torch.full((1,), float(value), dtype=torch.float64, device=self._device)

    def _to_host(self, numbers: Tensor) -> tuple[Tensor, Any]:
        """Start a copy to the host; return it with its event. The copy is the caller's alone until it was read."""
        if self._module is None:
            return numbers, None
        landing = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        landing.copy_(numbers, non_blocking=True)
        event = self._module.Event()
        event.record()
        return landing, event


class Reports:
    """The reports that have arrived. Iterating over them yields each once, in the order of updates.

    Args:
        act: called with each report when it arrives.

    Attributes:
        come_late: whether reports arrive one update late.
    """

    def __init__(self, readback: Readback, act: Callable[[StepReport], None]) -> None:
        self._readback = readback
        self._act = act
        self.come_late = readback.late
        self._unread: deque[StepReport] = deque(maxlen=2)  # one that came late, and that of the last update

    def __iter__(self) -> Iterator[StepReport]:
        while self._unread:
            yield self._unread.popleft()

    def receive(self) -> None:
        """Take in a report that has arrived, if there is one; after each update."""
        self._take(self._readback.arrived())

    def flush(self) -> None:
        """Wait for the report of the last update, unless it has arrived; all ranks after the same update."""
        self._take(self._readback.flush())

    def last(self, seconds: float) -> Iterator[StepReport]:
        """Yield the reports that are left when an error ends the run, without a collective.

        A device that has failed, or waits for a rank that has, is waited for no longer than `seconds`.
        """
        yield from self
        with suppress(Exception):  # the error that ends the run is the one to be raised
            if self._readback.ready(seconds) and (report := self._readback.flush()) is not None:
                yield report

    def _take(self, report: StepReport | None) -> None:
        if report is not None:
            self._unread.append(report)
            self._act(report)
