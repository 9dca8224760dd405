"""The time at which the host reads the numbers of an update.

CPU    at once: they are on the host already
GPU    update k is launched, then the numbers of update k - 1 are read: they have been ready for long, so the host
       doesn't wait and the GPU never idles
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn, cast

import torch

from lockstep.core.records import StepReport
from lockstep.distributed.consensus import NEXT_TOKENS, VoteResult

if TYPE_CHECKING:
    from torch import Tensor

Reporter = Callable[[list[float], float, bool, float, float], StepReport]


@dataclass(frozen=True, slots=True)
class UpdateNumbers:
    """The numbers of a report, on the host or on the GPU.

    Attributes:
        norm: of the gradient, unscaled, before clipping.
        keep: whether the update was kept.
        scale, count: the loss scale, and the number of valid targets by which the loss was divided.
    """

    outcome: VoteResult
    norm: float | Tensor
    keep: bool | Tensor
    scale: float | Tensor
    count: float | Tensor


class PendingReport:
    """The report of an update, whose numbers may not have arrived from a GPU yet."""

    __slots__ = ("_land", "_report")

    def __init__(self, land: Callable[[], None], report: StepReport | None = None) -> None:
        self._land = land
        self._report = report

    def arrive(self, report: StepReport) -> None:
        self._report = report

    def result(self) -> StepReport:
        """Return the report; wait until the GPU has finished the update."""
        if self._report is None:
            self._land()
        assert self._report is not None, "a later update reads the numbers of those before"
        return self._report

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"commit() returns a report that may still be on its way from the device, which has no {name!r}; "
            f"write commit().result().{name}"
        )


class HostReadback:
    """Reads numbers that are on the host."""

    def __init__(self) -> None:
        self._tokens = 0
        self._latest: StepReport | None = None

    def start(self, tokens: int) -> None:
        """Set the number of tokens of the first update."""
        self._tokens = tokens

    def tokens(self) -> int:
        """Return the number of tokens of the current update, over all ranks."""
        return self._tokens

    def push(self, numbers: UpdateNumbers, reporter: Reporter) -> PendingReport:
        """Start reading an update's numbers; return its report."""
        outcome = numbers.outcome
        self._tokens = int(outcome.next_tokens)
        self._latest = reporter(
            cast("list[float]", outcome.slots),
            cast("float", numbers.norm),
            cast("bool", numbers.keep),
            cast("float", numbers.scale),
            cast("float", numbers.count),
        )
        return PendingReport(self.land, self._latest)

    def arrived(self) -> StepReport | None:
        """Return the report that has arrived since the last call, without waiting for one."""
        report, self._latest = self._latest, None
        return report

    def flush(self) -> StepReport | None:
        """Return the report that hasn't arrived yet, if any."""
        return self.arrived()

    def land(self) -> None:
        """Read the numbers that haven't arrived yet; `arrived` returns the same reports as without this call."""


class DeviceReadback:
    """Reads numbers that are on a GPU. It works on CPU tensors too, so that it can be tested without one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tokens = 0
        self._pending: tuple[Tensor, torch.cuda.Event | None, Reporter, PendingReport] | None = None
        self._ready: StepReport | None = None
        self._delivered: StepReport | None = None

    def start(self, tokens: int) -> None:
        self._tokens = tokens

    def tokens(self) -> int:
        self.land()
        return self._tokens

    def push(self, numbers: UpdateNumbers, reporter: Reporter) -> PendingReport:
        self.land()
        self._delivered, self._ready = self._ready, None
        slots = cast("Tensor", numbers.outcome.slots)
        rest = [numbers.norm, numbers.keep, numbers.scale, numbers.count]
        together = torch.cat([slots, *(self._number(value) for value in rest)])
        pending = PendingReport(self.land)
        self._pending = (*self._to_host(together), reporter, pending)
        return pending

    def arrived(self) -> StepReport | None:
        report, self._delivered = self._delivered, None
        return report

    def flush(self) -> StepReport | None:
        self.land()
        ready, self._ready = self._ready, None
        return ready

    def land(self) -> None:
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

    def _to_host(self, numbers: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        if self._device.type != "cuda":
            return numbers, None
        landing = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
        landing.copy_(numbers, non_blocking=True)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return landing, event


Readback = HostReadback | DeviceReadback


def readback_from(device: torch.device) -> Readback:
    return HostReadback() if device.type == "cpu" else DeviceReadback(device)
