"""When the host reads the numbers of an update.

CPU    at once: they are already here
GPU    update k is launched, then the numbers of update k - 1 are read: they were finished long ago, so the
       host waits for nothing and the GPU never idles
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
    """What a report is made of, where it lies: on the host or on the GPU.

    Attributes:
        norm: of the gradient, unscaled, before clipping.
        keep: whether the update was made.
        scale, count: the loss scale and the valid targets that its loss was multiplied with and divided by.
    """

    outcome: VoteResult
    norm: float | Tensor
    keep: bool | Tensor
    scale: float | Tensor
    count: float | Tensor


class PendingReport:
    """The report of one update, which may still be on its way from a GPU."""

    __slots__ = ("_land", "_report")

    def __init__(self, land: Callable[[], None], report: StepReport | None = None) -> None:
        self._land = land
        self._report = report

    def arrive(self, report: StepReport) -> None:
        self._report = report

    def result(self) -> StepReport:
        """Return the report; waits until the GPU has finished the update."""
        if self._report is None:
            self._land()
        assert self._report is not None, "a later update reads the numbers of those before"
        return self._report

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"commit() returns a report that may still be on its way from the device, which has no {name!r}; "
            f"write commit().result().{name}"
        )


def _no_waiting() -> None: ...


class HostReadback:
    """Reads numbers that are on the host."""

    def __init__(self) -> None:
        self._tokens = 0
        self._latest: StepReport | None = None

    def start(self, tokens: int) -> None:
        """Take the number of tokens of the first update."""
        self._tokens = tokens

    def tokens(self) -> int:
        """Return the tokens of the current update, over all ranks."""
        return self._tokens

    def push(self, numbers: UpdateNumbers, reporter: Reporter) -> PendingReport:
        """Take an update's numbers; return its report."""
        outcome = numbers.outcome
        self._tokens = int(outcome.next_tokens)
        self._latest = reporter(
            cast("list[float]", outcome.slots),
            cast("float", numbers.norm),
            cast("bool", numbers.keep),
            cast("float", numbers.scale),
            cast("float", numbers.count),
        )
        return PendingReport(_no_waiting, self._latest)

    def arrived(self) -> StepReport | None:
        """Return the report that has arrived since the last call, without waiting for one."""
        report, self._latest = self._latest, None
        return report

    def flush(self) -> StepReport | None:
        """Return the report that is still on its way, if any."""
        return self.arrived()

    def land(self) -> None:
        """Read what is on its way; `arrived` returns its report when it would have."""


class DeviceReadback:
    """Reads numbers that are on a GPU. It works on CPU tensors too, so that it can be tested without one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tokens = 0
        self._on_its_way: tuple[Tensor, torch.cuda.Event | None, Reporter, PendingReport] | None = None
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
        self._on_its_way = (*self._to_host(together), reporter, pending)
        return pending

    def arrived(self) -> StepReport | None:
        report, self._delivered = self._delivered, None
        return report

    def flush(self) -> StepReport | None:
        self.land()
        ready, self._ready = self._ready, None
        return ready

    def land(self) -> None:
        if self._on_its_way is None:
            return
        numbers, event, reporter, pending = self._on_its_way
        self._on_its_way = None
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
