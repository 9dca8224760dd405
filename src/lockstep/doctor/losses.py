"""Finds in a run's losses that they are not finite, larger than they were, or no smaller than at the start.

loss  4.2 3.9 ... 1.3 ... 9.8     medians of a tenth of the values, at the start, the lowest, and at the end
"""

from __future__ import annotations

import math

import numpy as np

from lockstep.core.formatting import value
from lockstep.report.series import Series

_FEWEST = 20  # values, of which fewer show nothing
_PARTS = 10
_GROWN = 2.0  # as large as the lowest, and larger than at the start: diverged
_IMPROVED = 0.99  # of the median at the start


def divergence(loss: Series) -> str | None:
    """Return a sentence if the run has diverged; None if it hasn't."""
    if len(loss.values) and not math.isfinite(loss.values[-1]):
        step = int(loss.steps[np.flatnonzero(loss.finite)[-1] + 1]) if loss.finite.any() else int(loss.steps[0])
        return f"The loss is not finite from step {step:,} on."
    medians = _medians(loss)
    if len(medians) < 2:
        return None
    lowest, last = min(medians[:-1], key=lambda item: item[1]), medians[-1]
    if last[1] > medians[0][1] and last[1] - lowest[1] > (_GROWN - 1) * abs(lowest[1]):
        return (
            f"The loss has diverged: it was {value(lowest[1])} around step {lowest[0]:,}, and is {value(last[1])} at "
            "the end. Lower optim.lr, lengthen its warmup, or set optim.clip_norm: 1.0."
        )
    return None


def no_improvement(loss: Series) -> str | None:
    """Return a sentence if the losses at the end are no smaller than those at the start."""
    medians = _medians(loss)
    if len(medians) < 2 or medians[-1][1] < medians[0][1] - (1 - _IMPROVED) * abs(medians[0][1]):
        return None
    return (
        f"The loss did not improve: {value(medians[0][1])} at the start, {value(medians[-1][1])} at the end. Compare "
        "the learning rate and the data with a run that does: lockstep report."
    )


def _medians(loss: Series) -> list[tuple[int, float]]:
    """Return step and median of each tenth of the finite values; none if they are few."""
    steps, values = loss.known_steps, loss.known
    if len(values) < _FEWEST:
        return []
    parts = zip(np.array_split(steps, _PARTS), np.array_split(values, _PARTS), strict=True)
    return [(int(part_steps[0]), float(np.median(part))) for part_steps, part in parts]
