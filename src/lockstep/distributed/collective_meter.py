"""The meter of collectives: how long this rank waits for others, and how much it exchanges.

    torch.distributed, FSDP, DeepSpeed, pipelines --> ProcessGroup.allreduce(...) --> Work --> Work.wait()
    tensor parallelism                            --> functional collectives --> wait_tensor()
    DDP                                           --> its reducer, in C++: `sharding.ddp` counts in `World.reduced`

Bytes and bandwidths are defined as in nccl-tests (PERFORMANCE.md).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any

import torch
import torch.distributed as dist

from lockstep.core import heartbeat
from lockstep.core.collective_names import OPERATIONS, bus_factor
from lockstep.core.phase_clock import Phase, PhaseClock
from lockstep.distributed.process_group import ReducedGradients

_COMMUNICATION = Phase.COMMUNICATION
_CALLS = heartbeat.CALLS
_MAX_STARTED = 256


@dataclass(slots=True)
class CollectiveTotals:
    """The totals of one operation over groups of one size.

    Attributes:
        size: Bytes of all calls, of the whole tensor.
        timed_size, timed_seconds: Of the calls that were waited for until they were complete.
    """

    calls: int = 0
    size: int = 0
    timed_size: int = 0
    timed_seconds: float = 0.0


class CollectiveMeter:
    """Counts this rank's collectives by operation and group size, and marks the time that it waits."""

    def __init__(self, clock: PhaseClock, reduced: ReducedGradients | None = None) -> None:
        self._clock = clock
        self._reduced = reduced or ReducedGradients()
        self.totals: dict[tuple[str, int], CollectiveTotals] = {}
        self._started: dict[int, tuple[CollectiveTotals, int, float]] = {}  # by the work's id

    def gauges(self) -> dict[str, float]:
        """Return, by operation, the bytes so far, and the bus bandwidth in bytes per second.

        The bandwidth is left out if less than half of the bytes were timed: DDP's reduction isn't.
        """
        values: dict[str, float] = {}
        for operation in dict.fromkeys(operation for operation, _ in list(self.totals)):
            of_groups = [(ranks, each) for (name, ranks), each in list(self.totals.items()) if name == operation]
            values[f"{operation}_bytes"] = sum(each.size for _, each in of_groups)
            ranks, largest = max(of_groups, key=lambda group: group[1].timed_size)
            unseen = self._reduced.size if operation == "all_reduce" else 0
            if largest.timed_seconds and 2 * largest.timed_size >= values[f"{operation}_bytes"] + unseen:
                bandwidth = largest.timed_size / largest.timed_seconds
                values[f"{operation}_bus_bytes_per_second"] = bandwidth * bus_factor(operation, ranks)
        if self._reduced.size:
            values["all_reduce_bytes"] = values.get("all_reduce_bytes", 0.0) + self._reduced.size
        return values

    def count(self, operation: str, ranks: int, size: int) -> CollectiveTotals:
        """Count a call of `size` bytes."""
        totals = self.totals.get((operation, ranks))
        if totals is None:
            totals = self.totals[operation, ranks] = CollectiveTotals()
        totals.calls += 1
        totals.size += size
        return totals

    @contextmanager
    def measuring(self) -> Iterator[None]:
        """Measure torch's collectives while the block runs, in the modules imported so far."""
        group: Any = dist.ProcessGroup
        places: list[tuple[Any, str, Callable[..., Any]]] = [
            *((group, name, partial(self._counted, *OPERATIONS[name])) for name in OPERATIONS if name in vars(group)),
            (dist.Work, "wait", self._waited),
            *((owner, name, self._marked) for owner, name in _waits()),
        ]
        originals = [(owner, name, vars(owner)[name]) for owner, name, _ in places]
        for (owner, name, wrap), (_, _, original) in zip(places, originals, strict=True):
            setattr(owner, name, wrap(original))
        try:
            yield
        finally:
            for owner, name, original in originals:
                setattr(owner, name, original)
            self._started.clear()

    def _counted(self, operation: str, argument: int, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return a method of process groups that counts its calls and marks their time."""
        clock, beat = self._clock, heartbeat.own().numbers

        @wraps(original)
        def call(group: dist.ProcessGroup, *arguments: Any, **options: Any) -> Any:
            size = _size(arguments[argument]) if len(arguments) > argument else 0
            totals = self.count(operation, group.size(), size)
            beat[_CALLS] += 1
            before, began = clock.enter(_COMMUNICATION), time.perf_counter()
            try:
                work = original(group, *arguments, **options)
            finally:
                clock.enter(before)
            if work is not None and size:
                if len(self._started) >= _MAX_STARTED:  # some are never waited for, only their streams
                    self._started.clear()
                self._started[id(work)] = (totals, size, began)
            return work

        return call

    def _waited(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Return `Work.wait` that marks its time, and times the collective if it is over only then."""
        clock, started = self._clock, self._started

        @wraps(original)
        def wait(work: dist.Work, *arguments: Any, **options: Any) -> Any:
            call = started.pop(id(work), None)
            is_early = call is not None and not work.is_completed()
            before = clock.enter(_COMMUNICATION)
            try:
                result = original(work, *arguments, **options)
            finally:
                clock.enter(before)
            if call is not None and is_early and work.is_completed():  # or the device's stream waits, not the host
                totals, size, began = call
                totals.timed_size += size
                totals.timed_seconds += time.perf_counter() - began
            return result

        return wait

    def _marked(self, original: Callable[..., Any]) -> Callable[..., Any]:
        clock = self._clock

        @wraps(original)
        def call(*arguments: Any, **options: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*arguments, **options)
            before = clock.enter(_COMMUNICATION)
            try:
                return original(*arguments, **options)
            finally:
                clock.enter(before)

        return call


def _waits() -> Iterator[tuple[Any, str]]:
    """Yield the functions of torch that wait for collectives in another way than by `Work.wait`."""
    functional = sys.modules.get("torch.distributed._functional_collectives")
    if functional is not None:
        yield functional, "wait_tensor"
    fsdp = sys.modules.get("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    if fsdp is not None:  # on a GPU these let the stream wait
        yield fsdp.FSDPParamGroup, "wait_for_unshard"
        yield fsdp.FSDPParamGroup, "finalize_backward"


def _size(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    return sum(map(_size, value)) if isinstance(value, list | tuple) else 0
