"""The vote of all ranks: one small float64 sum over the data axis for each update, reduced during the backward.

    forward | open                                                                       backward | close
    rank 0   [loss sum | next count | next tokens | norm before | stop? evaluate? ...]            squared norm
    rank 1   [loss sum | next count | next tokens | norm before | stop? evaluate? ...]            squared norm
             ------------------------------------------------------------------------ sum
    all      the same numbers, so the same decision everywhere

The counts of valid targets are for the *next* update; its batch is already there, and so the divisor of the loss is
known before the forward starts. A request was made by some rank if its slot is above zero.

The norm is of the gradient summed over ranks, the same on all: a strategy that shards gradients sums it. The next
vote compares the ranks' norms, in a sum, where one outlier among 1,024 ranks shows as among 2:

    x --> cell of ln x on a grid --> two integers below 2^14 --> each, and its square, summed exactly in float64

    all in one cell      n x sum of squares = (sum)^2, exactly
    anything else        larger

Two grids are compared, the second moved by half a cell: numbers closer than half a cell (2e-5 of them) share a cell of
one of them at least, and numbers further apart than a cell (4e-5) of none. Exact for up to 2^24 ranks.

On the CPU the result is a list of floats. On a GPU it stays on the device, so that no update makes the host wait.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from lockstep.core.records import Request, Tally

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.core.protocols import Axis

_CELL = 4e-5  # of ln x; squared norms of one gradient differ by 2e-5 at most, on all hardware
_ORIGIN = 20_000_000.0  # below all logarithms of float64, in cells
_PART = 1 << 14  # cells are below its square
_NOT_FINITE, _ZERO = 0.0, 1.0  # instead of a cell
SLOTS = 8
"""Numbers that compare one of each rank, in a sum over ranks."""

LOSS_SUM, NEXT_COUNT, NEXT_TOKENS, NORM_BEFORE = range(4)
FIRST_TALLY = NORM_BEFORE + SLOTS
FIRST_REQUEST = FIRST_TALLY + len(Tally)
_NO_REQUESTS = (0.0,) * len(Request)
_NO_NORM = (0.0,) * SLOTS


class VoteResult(NamedTuple):
    """The result of a vote, the same on all ranks. Floats on the CPU, 0-dim float64 tensors on a GPU.

    Attributes:
        loss_sum: Over all valid targets of the update.
        squared_norm: Of the whole accumulated gradient.
        next_count, next_tokens: Of the next update, over all ranks.
        slots: All sums, for `requests_in` and `gradients_agree`.
    """

    loss_sum: float | Tensor
    squared_norm: float | Tensor
    next_count: float | Tensor
    next_tokens: float | Tensor
    slots: list[float] | Tensor


class HostConsensus:
    """The vote for tensors on the CPU, where reading a number costs nothing.

    Args:
        loss_sum: Returns the sum of losses over all ranks, 0-dim, once the gradient is reduced, if a strategy adds it
            in an order of its own; None: the vote adds it.
    """

    def __init__(self, axis: Axis, loss_sum: Callable[[], Tensor] | None = None) -> None:
        self._axis = axis
        self._loss_sum = loss_sum
        self._norm_before = _NO_NORM
        self._own: list[float] = []  # a single rank's, which are the sums
        self._finish: Callable[[], Tensor] | None = None

    def announce(self, count: float, tokens: int) -> tuple[float, float]:
        """Return the sums over the axis of a first update's counts; later ones come with the vote before them."""
        if self._axis.size == 1:
            return float(count), float(tokens)
        numbers = self._axis.start_sum(torch.tensor([float(count), float(tokens)], dtype=torch.float64))().tolist()
        return numbers[0], numbers[1]

    def open(
        self, loss_sum: Tensor, count: float, tokens: int, tallies: Sequence[float], requests: Iterable[Request]
    ) -> None:
        """Start the sum of what this rank knows before the backward, and return at once. Each `open` needs a `close`.

        Args:
            loss_sum: Of this rank's micro-batches, 0-dim.
            count, tokens: Of this rank's share of the next update.
            tallies: One for each `Tally`.
        """
        slots = [loss_sum.item(), float(count), float(tokens), *self._norm_before, *tallies, *_NO_REQUESTS]
        for request in requests:
            slots[FIRST_REQUEST + request.value] = 1.0
        if self._axis.size == 1:  # the hot path of a single process makes no tensor
            self._own = slots
            return
        self._finish = self._axis.start_sum(torch.tensor(slots, dtype=torch.float64))

    def close(self, squared_norm: Callable[[], Tensor]) -> VoteResult:
        """Return the result of the vote.

        The sum is waited for before another one begins: gloo stops reading from a rank after a failed sum, and one
        that comes after it would never end.

        Args:
            squared_norm: Returns the squared norm of the gradient summed over ranks, 0-dim; the same on all.
        """
        slots = self._own if self._finish is None else self._finish().tolist()
        norm = squared_norm().item()
        if self._axis.size > 1:
            self._norm_before = slots_of(norm)
        if self._loss_sum is not None:
            slots[LOSS_SUM] = self._loss_sum().item()
        return VoteResult(slots[LOSS_SUM], norm, slots[NEXT_COUNT], slots[NEXT_TOKENS], slots)


class DeviceConsensus:
    """The vote for tensors on a GPU: the result stays there. It has the methods of `HostConsensus`."""

    def __init__(self, axis: Axis, device: torch.device, loss_sum: Callable[[], Tensor] | None = None) -> None:
        self._axis = axis
        self._device = device
        self._loss_sum = loss_sum
        self._norm_before = torch.zeros(SLOTS, dtype=torch.float64, device=device)
        self._finish: Callable[[], Tensor] | None = None

    def announce(self, count: float, tokens: int) -> tuple[Tensor, Tensor]:
        numbers = self._axis.start_sum(self._to_device([float(count), float(tokens)]))()
        return numbers[0], numbers[1]

    def open(
        self, loss_sum: Tensor, count: float, tokens: int, tallies: Sequence[float], requests: Iterable[Request]
    ) -> None:
        request_slots = [*_NO_REQUESTS]
        for request in requests:
            request_slots[request.value] = 1.0
        host = self._to_device([float(count), float(tokens), *tallies, *request_slots])
        own_loss = loss_sum.to(self._device, torch.float64, non_blocking=True).view(1)
        slots = torch.cat([own_loss, host[:2], self._norm_before, host[2:]])
        self._finish = self._axis.start_sum(slots)

    def close(self, squared_norm: Callable[[], Tensor]) -> VoteResult:
        assert self._finish is not None, "a vote is opened before it is closed"
        norm = squared_norm().to(self._device, torch.float64, non_blocking=True)  # offloaded gradients are on the host
        if self._axis.size > 1:
            self._norm_before = slots_on_device(norm)
        slots = self._finish()
        if self._loss_sum is not None:
            slots[LOSS_SUM] = self._loss_sum().to(self._device, torch.float64, non_blocking=True)
        return VoteResult(slots[LOSS_SUM], norm, slots[NEXT_COUNT], slots[NEXT_TOKENS], slots)

    def _to_device(self, numbers: list[float]) -> Tensor:
        tensor = torch.tensor(numbers, dtype=torch.float64)
        if self._device.type != "cpu":
            tensor = tensor.pin_memory()
        return tensor.to(self._device, non_blocking=True)


Consensus = HostConsensus | DeviceConsensus


def requests_in(slots: Sequence[float]) -> frozenset[Request]:
    """Return the requests that any rank made."""
    if not any(slots[FIRST_REQUEST:]):
        return frozenset()
    return frozenset(request for request in Request if slots[FIRST_REQUEST + request.value] > 0)


def gradients_agree(slots: Sequence[float], ranks: int) -> bool:
    """Return whether the update before had the same gradient norm on all ranks, given the sums over them."""
    high, low, high_moved, low_moved, *squares = map(int, slots[NORM_BEFORE:FIRST_TALLY])
    if ranks * squares[0] == high * high and ranks * squares[1] == low * low:
        return True
    return ranks * squares[2] == high_moved * high_moved and ranks * squares[3] == low_moved * low_moved


def slots_of(number: float) -> tuple[float, ...]:
    """Return the numbers that stand for one of a rank, which ranks sum."""
    if not math.isfinite(number) or number <= 0.0:
        first = second = _ZERO if number == 0.0 else _NOT_FINITE
    else:
        place = math.log(number) / _CELL + _ORIGIN
        first, second = math.floor(place), math.floor(place + 0.5)
    parts = (*map(float, divmod(first, _PART)), *map(float, divmod(second, _PART)))
    return (*parts, *map(operator.mul, parts, parts))


def slots_on_device(number: Tensor) -> Tensor:
    """Return the same [SLOTS] of a 0-dim float64 tensor, without a wait of the host."""
    usable = number.isfinite() & (number > 0)
    place = torch.where(usable, number, 1.0).log() / _CELL + _ORIGIN
    other = torch.where(number == 0, _ZERO, _NOT_FINITE)
    cells = torch.where(usable, torch.stack([place, place + 0.5]).floor(), other)
    high = (cells / _PART).floor()
    parts = torch.stack([high, cells - high * _PART], dim=1).view(-1)
    return torch.cat([parts, parts * parts])
