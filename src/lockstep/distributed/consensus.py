"""Agreeing is nearly free: one small float64 sum over the data axis for each update.

    rank 0   [loss sum | squared norm | next count | next tokens | stop? evaluate? ...]
    rank 1   [loss sum | squared norm | next count | next tokens | stop? evaluate? ...]
             ---------------------------------------------------------------------- sum
    all      the same numbers, so the same decision everywhere, without a further message

The counts of valid targets are those of the *next* update, whose batch is already there: what the loss is divided
by is known before the forward starts. A request's slot above zero means that somebody asked.

On the CPU the outcome is a list of floats. On a GPU it stays on the device, so that no update makes the host wait.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lockstep.core.records import Request

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.core.protocols import Axis

LOSS_SUM, SQUARED_NORM, NEXT_COUNT, NEXT_TOKENS, FIRST_REQUEST = range(5)
_NO_REQUESTS = (0.0,) * len(Request)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What all ranks know after a vote. Floats on the CPU, 0-dim float64 tensors on a GPU.

    Attributes:
        loss_sum: over all valid targets of the update.
        squared_norm: of the whole accumulated gradient.
        next_count, next_tokens: of the next update, over all ranks.
        slots: the whole vector, for whoever reads it later.
    """

    loss_sum: float | Tensor
    squared_norm: float | Tensor
    next_count: float | Tensor
    next_tokens: float | Tensor
    slots: list[float] | Tensor


class HostConsensus:
    """For tensors on the CPU, where reading a number costs nothing."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis

    def announce(self, count: int, tokens: int) -> tuple[float, float]:
        """Sums over the axis of a first update's counts; later ones come with the vote before them."""
        return tuple(self._sum([float(count), float(tokens)]))  # type: ignore[return-value]

    def vote(
        self, loss_sum: Tensor, squared_norm: Tensor, count: int, tokens: int, requests: Iterable[Request]
    ) -> Outcome:
        slots = [loss_sum.item(), squared_norm.item(), float(count), float(tokens), *_NO_REQUESTS]
        for request in requests:
            slots[FIRST_REQUEST + request.value] = 1.0
        slots = self._sum(slots)
        return Outcome(slots[0], slots[1], slots[2], slots[3], slots)

    def _sum(self, numbers: list[float]) -> list[float]:
        if self._axis.size == 1:  # the hot path of a single process: no tensor is made for nobody
            return numbers
        total: list[float] = self._axis.sum(torch.tensor(numbers, dtype=torch.float64)).tolist()
        return total


class DeviceConsensus:
    """For tensors on a GPU: the outcome stays there."""

    def __init__(self, axis: Axis, device: torch.device) -> None:
        self._axis = axis
        self._device = device

    def announce(self, count: int, tokens: int) -> tuple[Tensor, Tensor]:
        numbers = self._axis.sum(self._to_device([float(count), float(tokens)]))
        return numbers[0], numbers[1]

    def vote(
        self, loss_sum: Tensor, squared_norm: Tensor, count: int, tokens: int, requests: Iterable[Request]
    ) -> Outcome:
        host = [float(count), float(tokens), *_NO_REQUESTS]
        for request in requests:
            host[FIRST_REQUEST - NEXT_COUNT + request.value] = 1.0
        slots = torch.cat([loss_sum.double().view(1), squared_norm.double().view(1), self._to_device(host)])
        slots = self._axis.sum(slots)
        return Outcome(slots[LOSS_SUM], slots[SQUARED_NORM], slots[NEXT_COUNT], slots[NEXT_TOKENS], slots)

    def _to_device(self, numbers: list[float]) -> Tensor:
        tensor = torch.tensor(numbers, dtype=torch.float64)
        if self._device.type == "cuda":
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)


Consensus = HostConsensus | DeviceConsensus


def consensus_over(axis: Axis, device: torch.device) -> Consensus:
    return HostConsensus(axis) if device.type == "cpu" else DeviceConsensus(axis, device)


def requests_in(slots: list[float]) -> frozenset[Request]:
    """The requests that any rank made."""
    if not any(slots[FIRST_REQUEST:]):
        return frozenset()
    return frozenset(request for request in Request if slots[FIRST_REQUEST + request.value] > 0)
