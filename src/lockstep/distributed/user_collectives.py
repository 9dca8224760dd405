"""Collectives for user code, such as objectives and loops, on any number of ranks.

    gather(v) = [v of rank 0, v of rank 1, ...]      broadcast(v) = v of rank 0      print_once: rank 0 prints

All ranks call these together: those of the run or, outside of one, of the process group that was initialized, if any.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar, cast

import torch.distributed as dist

from lockstep.distributed.collectives import LocalGroup, RankGroup

if TYPE_CHECKING:
    from lockstep.core.protocols import Axis

T = TypeVar("T")
_axes: list[Axis] = [LocalGroup()]
"""The ranks of the runs that this process is in, the innermost last. Process-wide, since objectives
and other user code call these functions without a session."""


def gather(value: T) -> list[T]:
    """Return every rank's value, in the order of ranks; any picklable object. Too slow for each step."""
    return cast("list[T]", all_ranks().gather(value))


def broadcast(value: T, source: int = 0) -> T:
    """Return a rank's value, by default the first's, on all ranks; any picklable object.

    Raises:
        ValueError: There is no rank `source`.
    """
    axis = all_ranks()
    if not 0 <= source < axis.size:
        raise ValueError(f"lockstep.loops.broadcast: there is no rank {source}; the last one is {axis.size - 1}")
    return cast("T", axis.gather(value)[source] if source else axis.broadcast(value))


def print_once(*values: object) -> None:
    """Print on the first rank only; outside a run, in the process that its launcher named rank 0 (`RANK`)."""
    if rank_and_size()[0] == 0:
        print(*values, flush=True)


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks; outside a run, as its launcher named them."""
    if len(_axes) > 1 or dist.is_initialized():
        axis = all_ranks()
        return axis.rank, axis.size
    return int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)


def all_ranks() -> Axis:
    """Return the ranks of the run or, outside of one, of the process group that this process has joined, if any."""
    if len(_axes) == 1 and dist.is_initialized():
        return RankGroup(dist.distributed_c10d._get_default_group())
    return _axes[-1]


@contextmanager
def current_group(axis: Axis) -> Iterator[None]:
    """Have the functions of this module use the ranks of `axis` while the block runs."""
    _axes.append(axis)
    try:
        yield
    finally:
        _axes.pop()
