"""Times collectives and checks their values: each operation over sizes, and each pair of ranks.

    S    bytes of the largest buffer that one rank has          t    seconds, the median of some calls
    algorithm bandwidth = S / t
    bus bandwidth       = S / t x factor, which doesn't depend on the number of ranks

Definitions and factors are those of nccl-tests (github.com/NVIDIA/nccl-tests, doc/PERFORMANCE.md; for gather and
scatter, src/gather.cu and src/scatter.cu).
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

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
        size: S, in bytes.
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
        latency: Seconds of a message of a few bytes, one way.
        there, back: Bytes per second from the first to the second, and from the second to the first.
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


@dataclass(frozen=True)
class _Operation:
    """An operation of this rank: `prepare` returns its call, and a check of what the call has left.

    Attributes:
        factor: Bus bandwidth over algorithm bandwidth, for the number of ranks.
    """

    name: str
    factor: Callable[[int], float]
    prepare: Callable[[World, int], tuple[Callable[[], None], Callable[[], bool]]]


def timed_collectives(world: World, sizes: Iterable[int]) -> Iterator[TimedCollective]:
    """Yield each operation with each size, in bytes, up to one that is slow. All ranks together; all yield the same.

    Args:
        sizes: The smallest first.

    Raises:
        RuntimeError: A collective failed, or took longer than the group's timeout.
    """
    sizes = list(sizes)
    for operation in _OPERATIONS:
        for size, following in zip(sizes, [*sizes[1:], 0], strict=True):
            row = _timed_collective(world, operation, max(1, size // (4 * world.size)) * world.size)
            yield row
            if row.seconds * following > _LONGEST_CALL_S * size:
                break


def _timed_collective(world: World, operation: _Operation, elements: int) -> TimedCollective:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # torch 2.13 renames two, and 2.11 lacks the new names
        call, is_right = operation.prepare(world, elements)
        call()
        right = is_right()
        seconds = _median(world, call)
    answers: list[Any] = world.axis.gather((seconds, right))
    slowest, all_right = max(answer[0] for answer in answers), all(answer[1] for answer in answers)
    return TimedCollective(operation.name, 4 * elements, slowest, operation.factor(world.size), all_right)


def timed_pairs(world: World, pairs: Sequence[tuple[int, int]], size: int) -> list[TimedPair]:
    """Return each pair's latency and bandwidth, one pair after the other. All ranks together; all return the same.

    Args:
        size: Bytes of the largest message; a slow pair exchanges smaller ones.

    Raises:
        RuntimeError: As `timed_collectives`.
    """
    return [_timed_pair(world, first, second, size) for first, second in pairs]


def _timed_pair(world: World, first: int, second: int, size: int) -> TimedPair:
    there_s, is_right = _timed_message(world, first, second, 4)
    back_s, _ = _timed_message(world, second, first, 4)
    there, arrives_there = _bandwidth(world, first, second, size)
    back, arrives_back = _bandwidth(world, second, first, size)
    return TimedPair(first, second, (there_s + back_s) / 4, there, back, is_right and arrives_there and arrives_back)


def _bandwidth(world: World, sender: int, receiver: int, size: int) -> tuple[float, bool]:
    """Return the bytes per second from one rank to another, and whether they arrive as they are sent."""
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


def _median(world: World, call: Callable[[], None]) -> float:
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
    """Return what `rank` contributes: whole numbers that differ from rank to rank and from place to place."""
    return (torch.arange(elements, device=world.device) + 31 * rank).remainder(_PATTERN).to(torch.float32)


def _all_reduce(world: World, elements: int) -> tuple[Callable[[], None], Callable[[], bool]]:
    mine = _values(world, world.rank, elements)
    buffer = mine.clone()
    expected = torch.stack([_values(world, rank, elements) for rank in range(world.size)]).sum(0)
    return lambda: _discard(dist.all_reduce(buffer)), lambda: torch.equal(buffer, expected)


def _broadcast(world: World, elements: int) -> tuple[Callable[[], None], Callable[[], bool]]:
    buffer = _values(world, world.rank, elements)
    return lambda: _discard(dist.broadcast(buffer, 0)), lambda: torch.equal(buffer, _values(world, 0, elements))


def _gather(world: World, elements: int) -> tuple[Callable[[], None], Callable[[], bool]]:
    part = elements // world.size
    mine = _values(world, world.rank, part)
    parts = [torch.empty_like(mine) for _ in range(world.size)] if world.rank == 0 else None

    def is_right() -> bool:
        return all(torch.equal(got, _values(world, rank, part)) for rank, got in enumerate(parts or ()))

    return lambda: _discard(dist.gather(mine, parts, 0)), is_right


def _scatter(world: World, elements: int) -> tuple[Callable[[], None], Callable[[], bool]]:
    part = elements // world.size
    buffer = torch.empty(part, device=world.device)
    parts = [_values(world, rank, part) for rank in range(world.size)] if world.rank == 0 else None
    return (
        lambda: _discard(dist.scatter(buffer, parts, 0)),
        lambda: torch.equal(buffer, _values(world, world.rank, part)),
    )


def _all_gather(world: World, elements: int) -> tuple[Callable[[], None], Callable[[], bool]]:
    part = elements // world.size
    mine, whole = _values(world, world.rank, part), torch.empty(elements, device=world.device)
    expected = torch.cat([_values(world, rank, part) for rank in range(world.size)])
    return lambda: _discard(dist.all_gather_into_tensor(whole, mine)), lambda: torch.equal(whole, expected)


def _reduce_scatter(world: World, elements: int) -> tuple[Callable[[], None], Callable[[], bool]]:
    mine = _values(world, world.rank, elements)
    part = torch.empty(elements // world.size, device=world.device)
    total = torch.stack([_values(world, rank, elements) for rank in range(world.size)]).sum(0)
    expected = total.chunk(world.size)[world.rank]
    return lambda: _discard(dist.reduce_scatter_tensor(part, mine)), lambda: torch.equal(part, expected)


def _all_to_all(world: World, elements: int) -> tuple[Callable[[], None], Callable[[], bool]]:
    mine = _values(world, world.rank, elements)
    received = torch.empty_like(mine)
    expected = torch.cat([_values(world, rank, elements).chunk(world.size)[world.rank] for rank in range(world.size)])
    return lambda: _discard(dist.all_to_all_single(received, mine)), lambda: torch.equal(received, expected)


def _send_receive(world: World, elements: int) -> tuple[Callable[[], None], Callable[[], bool]]:
    """Pass a buffer around the ring of ranks."""
    mine = _values(world, world.rank, elements)
    received = torch.empty_like(mine)
    after, before = (world.rank + 1) % world.size, (world.rank - 1) % world.size

    def call() -> None:
        sends, receives = dist.P2POp(dist.isend, mine, after), dist.P2POp(dist.irecv, received, before)
        for work in dist.batch_isend_irecv([sends, receives]):
            work.wait()

    return call, lambda: torch.equal(received, _values(world, before, elements))


def _discard(result: object) -> None:
    """Ignore what a collective returns."""


def _part_of_others(ranks: int) -> float:
    return (ranks - 1) / ranks


_OPERATIONS = (
    _Operation("all-reduce", lambda ranks: 2 * (ranks - 1) / ranks, _all_reduce),
    _Operation("broadcast", lambda ranks: 1.0, _broadcast),
    _Operation("gather", _part_of_others, _gather),
    _Operation("scatter", _part_of_others, _scatter),
    _Operation("all-gather", _part_of_others, _all_gather),
    _Operation("reduce-scatter", _part_of_others, _reduce_scatter),
    _Operation("all-to-all", _part_of_others, _all_to_all),
    _Operation("send/recv", lambda ranks: 1.0, _send_receive),
)
