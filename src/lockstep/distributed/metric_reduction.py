"""Metrics of all ranks as one, for any loop.

rank 0   reduce({"loss": 2.0}, weight=10)  --.
rank 1   reduce({"loss": 5.0}, weight=20)  --+--> {"loss": (2 x 10 + 5 x 20) / 30} on every rank
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal

from lockstep.distributed.user_collectives import gather

if TYPE_CHECKING:
    from torch import Tensor

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
    """Return metrics over all ranks, the same on each; all ranks call it together. Too slow for each step.

    Args:
        metrics: This rank's values by name, numbers or tensors with one element. A metric that a rank doesn't have is
            reduced over the others.
        weight: The number of samples or tokens behind this rank's values. The mean is weighted by it, so that ranks
            with unequal batches count as they should; a rank with weight 0 doesn't count at all.
        how: The reduction. A sum isn't multiplied by weights. NaN on one rank is NaN on all.

    Raises:
        ValueError: `how` is unknown, a value is not one number, or a weight is negative: on every rank.
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
    """Return values and weight as floats, or what is wrong with them: other ranks wait for an answer."""
    values = {}
    for name, value in metrics.items():
        try:
            values[name] = float(value)
        except (TypeError, ValueError, RuntimeError):
            return f"{name} is not one number: {type(value).__name__} {str(value)[:60]}"
    try:
        number = float(weight)
    except (TypeError, ValueError, RuntimeError):
        return f"the weight is not one number: {str(weight)[:60]}"
    if not (number >= 0 and math.isfinite(number)):
        return f"the weight is {number:g}; it must be a finite count"
    return values, number


def _divided(total: float, weight: float) -> float:
    return total / weight if weight else math.nan


def _extreme(choose: Callable[[list[float]], float], pairs: list[tuple[float, float]]) -> float:
    values = [value for value, _ in pairs]
    return math.nan if not values or any(math.isnan(value) for value in values) else choose(values)
