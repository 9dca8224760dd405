"""Collectives for user code, such as objectives and loops, on any number of ranks. All ranks call them together.

Outside of a run they use the process group that was initialized, if any.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import torch.distributed as dist

from lockstep.distributed.collectives import LocalGroup, RankGroup

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.core.protocols import Axis

T = TypeVar("T")
_axes: list[Axis] = [LocalGroup()]
"""The ranks of the runs that this process is in, the innermost last. Process-wide, since objectives
and other user code call these functions without a session."""


def gather(value: T) -> list[T]:
    """Return every rank's value, in the order of ranks; any picklable object. Too slow for each step."""
    return cast("list[T]", all_ranks().gather(value))


def broadcast(value: T, source: int = 0) -> T:
    """Return the value of rank `source` on all ranks; any picklable object. Raises ValueError for a wrong rank."""
    axis = all_ranks()
    if not 0 <= source < axis.size:
        raise ValueError(f"lockstep.loops.broadcast: there is no rank {source}; the last one is {axis.size - 1}")
    return cast("T", axis.gather(value)[source] if source else axis.broadcast(value))


def print_once(*values: object) -> None:
    """Print on rank 0."""
    if rank_and_size()[0] == 0:
        print(*values, flush=True)


def rank_and_size() -> tuple[int, int]:
    """Return this process's rank and the number of ranks; outside of a run, as its launcher set them."""
    if len(_axes) > 1 or dist.is_initialized():
        axis = all_ranks()
        return axis.rank, axis.size
    return int(os.environ.get("RANK") or 0), int(os.environ.get("WORLD_SIZE") or 1)


def all_ranks() -> Axis:
    """Return the ranks of the run; outside of one, of the process group, if any."""
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


# --- metrics --------------------------------------------------------------------------------------------------------

_REDUCTIONS: dict[str, Callable[[list[tuple[float, float]]], float]] = {
    "mean": lambda pairs: _divided(math.fsum(value * weight for value, weight in pairs), sum(w for _, w in pairs)),
    "sum": lambda pairs: math.fsum(value for value, _ in pairs),
    "min": lambda pairs: _extreme(min, pairs),
    "max": lambda pairs: _extreme(max, pairs),
}


def reduce(
    metrics: Mapping[str, float | Tensor],
    weight: float | Tensor = 1.0,
    how: Literal["mean", "sum", "min", "max"] = "mean",
) -> dict[str, float]:
    """Return metrics over all ranks, the same on each. Too slow for each step.

    Args:
        metrics: Numbers or tensors with one element, by name. A metric that a rank lacks is reduced over the others.
        weight: Samples or tokens behind this rank's values: the mean is weighted by it, and 0 leaves the rank out.
        how: A sum isn't weighted. NaN on one rank is NaN on all.

    Raises:
        ValueError: On every rank, if `how` is unknown, a value is not one number, or a weight is negative.
    """
    if how not in _REDUCTIONS:
        raise ValueError(f"lockstep.loops.reduce has no {how!r}; it has {', '.join(_REDUCTIONS)}")
    of_ranks = gather(_checked(metrics, weight))
    for rank, entry in enumerate(of_ranks):
        if isinstance(entry, str):
            raise ValueError(f"lockstep.loops.reduce on rank {rank}: {entry}")
    counting = [(values, weight) for values, weight in of_ranks if weight > 0]
    names = dict.fromkeys(name for values, _ in of_ranks for name in values)
    return {
        name: _REDUCTIONS[how]([(values[name], weight) for values, weight in counting if name in values])
        for name in names
    }


def _checked(metrics: Mapping[str, Any], weight: Any) -> Any:
    """Return values and weight as floats, or what is wrong: other ranks wait for an answer."""
    name, values = "the weight", {}
    try:
        number = float(weight)
        for name, value in metrics.items():
            values[name] = float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        return f"{name} is not one number: {error}"
    if not (number >= 0 and math.isfinite(number)):
        return f"the weight is {number:g}; it must be a finite count"
    return values, number


def _divided(total: float, weight: float) -> float:
    return total / weight if weight else math.nan


def _extreme(choose: Callable[[list[float]], float], pairs: list[tuple[float, float]]) -> float:
    values = [value for value, _ in pairs]
    return math.nan if not values or any(math.isnan(value) for value in values) else choose(values)
