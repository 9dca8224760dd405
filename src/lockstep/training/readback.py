"""When the host reads what an update came to.

CPU    at once: the numbers are already here
GPU    update k is launched, then the numbers of update k - 1 are read: they were finished long ago, so the
       host waits for nothing and the GPU never runs dry
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from lockstep.core.records import StepReport
from lockstep.distributed.consensus import NEXT_TOKENS, VoteResult

if TYPE_CHECKING:
    from torch import Tensor

Reporter = Callable[[list[float], float, bool, float, float], StepReport]


@dataclass(frozen=True, slots=True)
class Judgement:
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


class HostReadback:
    """For numbers on the host."""

    def __init__(self) -> None:
        self._tokens = 0

    def start(self, tokens: int) -> None:
        """Tokens of the first update."""
        self._tokens = tokens

    def tokens(self) -> int:
        """Tokens of the update that comes next, over all ranks."""
        return self._tokens

    def push(self, judgement: Judgement, reporter: Reporter) -> StepReport | None:
        """Takes an update's numbers; returns the report that is ready."""
        outcome = judgement.outcome
        self._tokens = int(outcome.next_tokens)
        return reporter(
            cast("list[float]", outcome.slots),
            cast("float", judgement.norm),
            cast("bool", judgement.keep),
            cast("float", judgement.scale),
            cast("float", judgement.count),
        )

    def flush(self) -> StepReport | None:
        return None

    def land(self) -> None:
        """Reads what is on its way; its report still comes when it would have."""


class DeviceReadback:
    """For numbers on a GPU; works, pointlessly, on CPU tensors too, so that it can be tested without one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tokens = 0
        self._on_its_way: tuple[Tensor, torch.cuda.Event | None, Reporter] | None = None
        self._ready: StepReport | None = None

    def start(self, tokens: int) -> None:
        self._tokens = tokens

    def tokens(self) -> int:
        self._land()
        return self._tokens

    def push(self, judgement: Judgement, reporter: Reporter) -> StepReport | None:
        self._land()
        ready, self._ready = self._ready, None
        slots = cast("Tensor", judgement.outcome.slots)
        rest = [judgement.norm, judgement.keep, judgement.scale, judgement.count]
        numbers = torch.cat([slots, *(self._number(value) for value in rest)])
        self._on_its_way = (*self._to_host(numbers), reporter)
        return ready

    def flush(self) -> StepReport | None:
        self._land()
        ready, self._ready = self._ready, None
        return ready

    def land(self) -> None:
        self._land()

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

    def _land(self) -> None:
        if self._on_its_way is None:
            return
        numbers, event, reporter = self._on_its_way
        self._on_its_way = None
        if event is not None:
            event.synchronize()
        *slots, norm, keep, scale, count = numbers.tolist()
        self._tokens = int(slots[NEXT_TOKENS])
        self._ready = reporter(slots, norm, bool(keep), scale, count)


Readback = HostReadback | DeviceReadback


def readback_from(device: torch.device) -> Readback:
    return HostReadback() if device.type == "cpu" else DeviceReadback(device)
