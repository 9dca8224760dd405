"""Times collectives and checks their values: each operation over sizes, and each pair of ranks.

Bandwidths as in nccl-tests (doc/PERFORMANCE.md): bytes of the largest buffer of a rank over the median seconds;
times a factor for the bus bandwidth, which doesn't depend on the number of ranks.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from lockstep.core.collective_names import bus_factor

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.distributed.process_group import World

_MOST_CALLS, _LEAST_CALLS, _SECONDS = 20, 3, 0.2
_LONGEST_CALL_S = 2.0  # an operation gets no size that is expected to take longer
_PAIR_CALLS, _PAIR_ENOUGH_S = 3, 0.05
_PAIR_SIZES = (64 << 10, 512 << 10)  # bytes, before the size that is asked for
_PATTERN = 97  # small whole numbers: their sums are exact in float32


@dataclass(frozen=True, slots=True)
class TimedCollective:
    """One operation with one size.

    Attributes:
        size: Bytes.
        seconds: The median over calls, of the slowest rank.
        bus_factor: Bus bandwidth over algorithm bandwidth.
        is_right: Whether every rank got the right values.
    """

    operation: str
    size: int
    seconds: float
    bus_factor: float
    is_right: bool

    @property
    def algorithm_bandwidth(self) -> float:
        """Bytes per second."""
        return self.size / self.seconds

    @property
    def bus_bandwidth(self) -> float:
        """Bytes per second."""
        return self.algorithm_bandwidth * self.bus_factor


@dataclass(frozen=True, slots=True)
class TimedPair:
    """Two ranks that exchange messages.

    Attributes:
        latency: Seconds of a small message, one way.
        there, back: Bytes per second in each direction.
        is_right: Whether messages arrived as they were sent.
    """

    first: int
    second: int
    latency: float
    there: float
    back: float
    is_right: bool

    @property
    def bandwidth(self) -> float:
        """Bytes per second of the slower direction."""
        return min(self.there, self.back)


def timed_collectives(world: World, sizes: Iterable[int]) -> Iterator[TimedCollective]:
    """Yield each operation with each size (bytes, ascending), up to one that is slow. All ranks together.

    Raises:
        RuntimeError: A collective failed or timed out.
    """
    sizes = list(sizes)
    for operation in _OPERATIONS:
        for size, following in zip(sizes, [*sizes[1:], 0], strict=True):
            row = _timed_collective(world, operation, max(1, size // (4 * world.size)) * world.size)
            yield row
            if row.seconds * following > _LONGEST_CALL_S * size:
                break


def _timed_collective(world: World, operation: str, elements: int) -> TimedCollective:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames two, and 2.11 lacks the new names
        call, received, expected = _OPERATIONS[operation](world, elements)
        call()
        right = torch.equal(received, expected)
        seconds = _median(world, call)
    answers: list[Any] = world.axis.gather((seconds, right))
    slowest, all_right = max(answer[0] for answer in answers), all(answer[1] for answer in answers)
    factor = bus_factor(operation.replace("-", "_"), world.size)
    return TimedCollective(operation, 4 * elements, slowest, factor, all_right)


def timed_pairs(world: World, pairs: Sequence[tuple[int, int]], size: int) -> list[TimedPair]:
    """Return each pair's latency and bandwidth for messages up to `size` bytes. All ranks together."""
    rows = []
    for first, second in pairs:
        there_s, is_right = _timed_message(world, first, second, 4)
        back_s, _ = _timed_message(world, second, first, 4)
        there, arrives_there = _bandwidth(world, first, second, size)
        back, arrives_back = _bandwidth(world, second, first, size)
        arrives = is_right and arrives_there and arrives_back
        rows.append(TimedPair(first, second, (there_s + back_s) / 4, there, back, arrives))
    return rows


def _bandwidth(world: World, sender: int, receiver: int, size: int) -> tuple[float, bool]:
    for bytes_ in (*(each for each in _PAIR_SIZES if each < size), size):
        seconds, is_right = _timed_message(world, sender, receiver, bytes_)
        if seconds > _PAIR_ENOUGH_S or not is_right:
            break
    return bytes_ / seconds, is_right


def _timed_message(world: World, sender: int, receiver: int, size: int) -> tuple[float, bool]:
    """Return the seconds until a message of `size` bytes is answered by one of 4, and whether it arrived as sent."""
    world.axis.gather(None)  # a barrier with a time limit
    own = (0.0, True)
    if world.rank in (sender, receiver):
        message = _values(world, sender, size // 4)
        buffer = message.clone() if world.rank == sender else torch.zeros_like(message)
        answer = torch.zeros(1, device=world.device)

        def call() -> None:
            if world.rank == sender:
                dist.send(buffer, receiver)
                dist.recv(answer, receiver)
            else:
                dist.recv(buffer, sender)
                dist.send(answer, sender)

        call()
        seconds = statistics.median(_seconds(call, world.device) for _ in range(_PAIR_CALLS))
        own = (seconds, torch.equal(buffer, message))
    answers: list[Any] = world.axis.gather(own)
    return answers[sender][0], answers[receiver][1]


def _median(world: World, call: Callable[[], object]) -> float:
    """Return the median of the seconds of some calls; all ranks make as many."""
    times = [_seconds(call, world.device) for _ in range(_LEAST_CALLS)]
    slowest = max(map(float, world.axis.gather(statistics.median(times))))  # type: ignore[arg-type]
    for _ in range(max(0, min(_MOST_CALLS, int(_SECONDS / slowest)) - _LEAST_CALLS)):
        times.append(_seconds(call, world.device))
    return statistics.median(times)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    began = time.perf_counter()
    call()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter() - began


def _values(world: World, rank: int, elements: int) -> Tensor:
    """Return what `rank` contributes: small whole numbers, which float32 sums exactly."""
    return (torch.arange(elements, device=world.device) + 31 * rank).remainder(_PATTERN).to(torch.float32)


# --- operations: each returns its call, the tensor that the first call fills, and what belongs there -----------------

Operation = tuple[Callable[[], object], "Tensor", "Tensor"]


def _all_reduce(world: World, elements: int) -> Operation:
    buffer = _values(world, world.rank, elements)
    total = torch.stack([_values(world, rank, elements) for rank in range(world.size)]).sum(0)
    return lambda: dist.all_reduce(buffer), buffer, total


def _broadcast(world: World, elements: int) -> Operation:
    buffer = _values(world, world.rank, elements)
    return lambda: dist.broadcast(buffer, 0), buffer, _values(world, 0, elements)


def _all_gather(world: World, elements: int) -> Operation:
    part = elements // world.size
    mine, whole = _values(world, world.rank, part), torch.empty(elements, device=world.device)
    expected = torch.cat([_values(world, rank, part) for rank in range(world.size)])
    return lambda: dist.all_gather_into_tensor(whole, mine), whole, expected


def _reduce_scatter(world: World, elements: int) -> Operation:
    mine = _values(world, world.rank, elements)
    part = torch.empty(elements // world.size, device=world.device)
    total = torch.stack([_values(world, rank, elements) for rank in range(world.size)]).sum(0)
    return lambda: dist.reduce_scatter_tensor(part, mine), part, total.chunk(world.size)[world.rank]


def _all_to_all(world: World, elements: int) -> Operation:
    mine = _values(world, world.rank, elements)
    received = torch.empty_like(mine)
    expected = torch.cat([_values(world, rank, elements).chunk(world.size)[world.rank] for rank in range(world.size)])
    return lambda: dist.all_to_all_single(received, mine), received, expected


def _send_receive(world: World, elements: int) -> Operation:
    mine = _values(world, world.rank, elements)
    received = torch.empty_like(mine)
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size

    def call() -> None:
        sends, receives = dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, received, before)
        for work in dist.batch_isend_irecv([sends, receives]):
            work.wait()

    return call, received, _values(world, before, elements)


_OPERATIONS: Mapping[str, Callable[[World, int], Operation]] = {
    "all-reduce": _all_reduce,
    "broadcast": _broadcast,
    "all-gather": _all_gather,
    "reduce-scatter": _reduce_scatter,
    "all-to-all": _all_to_all,
    "send/recv": _send_receive,
}
