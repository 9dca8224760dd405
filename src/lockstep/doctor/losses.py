"""Finds in a run's losses that they are not finite, larger than they were, or no smaller than at the start.

Compares medians of tenths of the values: at the start, the lowest, at the end; of few values, the last with the first.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lockstep.core.formatting import value
from lockstep.report.series import Numbers, Series

_FEWEST = 20  # values; fewer have no trend
_PARTS = 10
_GROWN = 2.0  # times the lowest, and larger than at the start: worth a note
_DIVERGED = 10.0  # times the lowest: no noise, and no opponent that learns, too
_EXPLODED = 1000.0  # times the first
_LAST = 2  # values at the end; a single one may be an outlier
_IMPROVED = 0.99  # of the median at the start
_REMEDY = "Lower optim.lr, lengthen its warmup, or set optim.clip_norm: 1.0."


@dataclass(frozen=True, slots=True)
class LossFinding:
    """A sentence about a run's losses; `is_wrong`: it diverged."""

    text: str
    is_wrong: bool


def finding_of_losses(loss: Series) -> LossFinding | None:
    """Return what is wrong with the losses, or noteworthy, if anything is."""
    if len(loss.values) and not math.isfinite(loss.values[-1]):
        step = int(loss.steps[np.flatnonzero(loss.finite)[-1] + 1]) if loss.finite.any() else int(loss.steps[0])
        return LossFinding(f"The loss is not finite from step {step:,} on. {_REMEDY}", is_wrong=True)
    if (exploded := _exploded(loss)) is not None:
        return LossFinding(exploded, is_wrong=True)
    medians = _medians(loss)
    return (_grown(medians) or _not_improved(medians)) if medians else None


def _exploded(loss: Series) -> str | None:
    values, steps = loss.known, loss.known_steps
    if len(values) < 2:
        return None
    last = float(values[-min(_LAST, len(values) - 1) :].min())
    before = _size_at_first(values)
    if before == 0.0 or last <= _EXPLODED * before:
        return None
    return (
        f"The loss has diverged: it was {value(float(values[0]))} at step {int(steps[0]):,}, and is "
        f"{value(float(values[-1]))} at step {int(steps[-1]):,}. {_REMEDY}"
    )


def _size_at_first(values: Numbers) -> float:
    """Return the size of the first values; of a loss that may be negative, the largest of the first half."""
    is_signed = bool((values < 0.0).any())
    return float(np.abs(values[: max(1, len(values) // 2)]).max() if is_signed else values[0])


def _grown(medians: list[tuple[int, float]]) -> LossFinding | None:
    (_, first), (_, last) = medians[0], medians[-1]
    step, lowest = min(medians[:-1], key=lambda item: item[1])
    if lowest <= 0.0:
        size = max(abs(median) for _, median in medians[: len(medians) // 2])
        if last <= 0.0 or last < _DIVERGED * size:
            return None
    elif last <= first or last < _GROWN * lowest:
        return None
    was = f"it was {value(lowest)} around step {step:,}, and is {value(last)} at the end. {_REMEDY}"
    if last < _DIVERGED * lowest:
        return LossFinding(f"The loss has grown: {was}", is_wrong=False)
    return LossFinding(f"The loss has diverged: {was}", is_wrong=True)


def _not_improved(medians: list[tuple[int, float]]) -> LossFinding | None:
    (_, first), (_, last) = medians[0], medians[-1]
    if last < first - (1 - _IMPROVED) * abs(first):
        return None
    text = (
        f"The loss did not improve: {value(first)} at the start, {value(last)} at the end. Compare the learning rate "
        "and the data with a run that does: lockstep report."
    )
    return LossFinding(text, is_wrong=False)


def _medians(loss: Series) -> list[tuple[int, float]]:
    steps, values = loss.known_steps, loss.known
    if len(values) < _FEWEST:
        return []
    parts = zip(np.array_split(steps, _PARTS), np.array_split(values, _PARTS), strict=True)
    return [(int(part_steps[0]), float(np.median(part))) for part_steps, part in parts]
