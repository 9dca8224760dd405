"""Reads the numbers of an update on the host.

CPU            at once: they are on the host already
accelerator    update k is launched, then the numbers of update k - 1 are read: the host doesn't wait

If something follows an update (an evaluation, a save, the end of the run, an error), `flush` reads its numbers at once.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any, cast

import torch

from lockstep.core.records import StepReport
from lockstep.distributed.consensus import NEXT_TOKENS, VoteResult

if TYPE_CHECKING:
    from torch import Tensor

Reporter = Callable[[list[float], float, bool, float, float], StepReport]
Rest = tuple["float | Tensor", "bool | Tensor", "float | Tensor", "float | Tensor"]
"""Norm of the gradient, unscaled; whether the update was kept; loss scale; the divisor of the loss."""


class PendingReport:
    """The report of an update; its numbers may not have arrived from an accelerator yet."""

    __slots__ = ("_land", "report")

    def __init__(self, land: Callable[[], None], report: StepReport | None = None) -> None:
        self._land = land
        self.report = report

    def result(self) -> StepReport:
        """Return the report; wait until the device has finished the update."""
        if self.report is None:
            self._land()
        assert self.report is not None, "a later update reads the numbers of those before"
        return self.report


class Readback:
    """Reads the numbers of updates. Iterating over it yields each report that has arrived once, in order.

    Attributes:
        late: Whether reports arrive one update late, as from an accelerator; also a CPU's, in tests.
        act: Called with each report when it arrives.
    """

    def __init__(self, device: torch.device, *, late: bool) -> None:
        self.late = late
        self.act: Callable[[StepReport], None] = lambda report: None
        self._device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._tokens = 0
        self._pending: tuple[Tensor, Any, Reporter, PendingReport] | None = None  # Any: the copy's event
        self._ready: StepReport | None = None  # landed, and not to be seen before the next update on any rank
        self._delivered: StepReport | None = None
        self._unread: deque[StepReport] = deque(maxlen=2)  # one that came late, and the last update's

    def __iter__(self) -> Iterator[StepReport]:
        while self._unread:
            yield self._unread.popleft()

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

    def receive(self) -> None:
        """Act on the report that has arrived, if there is one; after each update."""
        report, self._delivered = self._delivered, None
        if report is not None:
            self._unread.append(report)
            self.act(report)

    def flush(self) -> None:
        """Wait for the report of the last update, unless it has arrived; all ranks after the same update."""
        self.land()
        if self.late:
            self._delivered, self._ready = self._ready, None
        self.receive()

    def last(self, seconds: float) -> Iterator[StepReport]:
        """Yield the reports that are left when an error ends the run, without a collective.

        A device that has failed, or waits for a rank that has, is waited for no longer than `seconds`.
        """
        yield from self
        event = self._pending[1] if self._pending is not None else None
        until = time.monotonic() + seconds
        with suppress(Exception):  # the error that ends the run is the one to be raised
            while event is not None and not event.query():
                if time.monotonic() > until:
                    return
                time.sleep(0.001)
            self.act = lambda report: None
            self.flush()
            yield from self

    def land(self) -> None:
        """Read the numbers that haven't arrived yet; reports are received at the same time as without this call."""
        if self._pending is None:
            return
        numbers, event, reporter, pending = self._pending
        self._pending = None
        if event is not None:
            event.synchronize()
        *slots, norm, keep, scale, count = numbers.tolist()
        self._tokens = int(slots[NEXT_TOKENS])
        self._ready = pending.report = reporter(slots, norm, bool(keep), scale, count)

    def _number(self, value: float | bool | Tensor) -> Tensor:
        if isinstance(value, torch.Tensor):
            return value.to(torch.float64).view(1)
        return torch.full((1,), float(value), dtype=torch.float64, device=self._device)

    def _to_host(self, numbers: Tensor) -> tuple[Tensor, Any]:
        if self._module is None:
            return numbers, None
        landing = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        landing.copy_(numbers, non_blocking=True)
        event = self._module.Event()
        event.record()
        return landing, event
