"""The numbers of a curve, thinned for drawing, and the trend through their noise.

1,000,000 values --thin--> <= 5 a bucket: first, last, lowest, highest, one that isn't finite     drawn pale
                 --running_median--> 300                                                          drawn dark
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Numbers: TypeAlias = NDArray[np.float64]

_MEDIANS = 300
_NOISY = 120  # values; with as many or more a running median shows more
_LARGEST = 1e150  # larger values are drawn there: differences must not overflow
_SMALLEST = 1e-150  # smaller values are zero: differences must not vanish


@dataclass(frozen=True, slots=True)
class Series:
    """Values by step.

    Attributes:
        name: as in the legend.
        steps: ascending, each once.
        values: one a step; NaN where the value wasn't finite.
        noisy: whether a running median may be drawn over the values.
        color: the same number in every chart for what belongs together.
        dash: of its line; None: its color's.
    """

    name: str
    steps: Numbers
    values: Numbers
    noisy: bool = False
    color: int = 0
    dash: int | None = None

    @classmethod
    def of(
        cls,
        name: str,
        steps: Collection[float] | Numbers,
        values: Collection[float] | Numbers,
        *,
        noisy: bool = False,
        color: int = 0,
    ) -> Series:
        """Return the series of numbers in any order; the last value of a step counts."""
        step_array, array = (
            numbers if isinstance(numbers, np.ndarray) else np.array(list(numbers), np.float64)
            for numbers in (steps, values)
        )
        array = np.clip(np.where(np.isfinite(array), array, np.nan), -_LARGEST, _LARGEST)
        array[np.abs(array) < _SMALLEST] = 0.0
        if len(step_array) > 1 and not (np.diff(step_array) > 0).all():
            _, from_the_end = np.unique(step_array[::-1], return_index=True)
            step_array, array = step_array[::-1][from_the_end], array[::-1][from_the_end]
        return cls(name, step_array, array, noisy, color)

    @property
    def finite(self) -> NDArray[np.bool_]:
        return np.isfinite(self.values)

    @property
    def known(self) -> Numbers:
        """The finite values."""
        return self.values[self.finite]

    @property
    def known_steps(self) -> Numbers:
        """The steps of the finite values."""
        return self.steps[self.finite]

    @property
    def is_smoothed(self) -> bool:
        """True if a running median is drawn over the values."""
        return self.noisy and len(self.known) >= _NOISY

    @property
    def window(self) -> int:
        """The number of values under the running median: a 25th of all, and odd."""
        return 2 * max(1, len(self.known) // 50) + 1


def thin(steps: Numbers, values: Numbers, buckets: int) -> NDArray[np.intp]:
    """Return the indices worth drawing; all if they are few.

    Of each bucket along the steps these are the first, last, lowest and highest value, and one that isn't finite.
    The line through them covers the same pixels as that through all (M4; Jugel et al. 2014, PVLDB 7(10), section 4).
    """
    if len(steps) <= 4 * buckets:
        return np.arange(len(steps))
    places = np.floor((steps - steps[0]) / (steps[-1] - steps[0]) * buckets)
    bounds = [0, *(np.flatnonzero(np.diff(places)) + 1).tolist(), len(steps)]
    kept: set[int] = set()
    for start, end in pairwise(bounds):
        kept |= {start, end - 1}
        bucket = values[start:end]
        finite = np.isfinite(bucket)
        if finite.any():
            kept |= {start + int(np.nanargmin(bucket)), start + int(np.nanargmax(bucket))}
            if not finite.all():
                kept.add(start + int(np.argmin(finite)))
    return np.array(sorted(kept))


def running_median(series: Series, points: int = _MEDIANS) -> Series:
    """Return the median over a window of finite values, at `points` of them.

    Towards the ends the window shrinks evenly to both sides, so the curve begins and ends where the values do.
    """
    values = series.known
    places = np.unique(np.linspace(0, len(values) - 1, min(points, len(values))).round().astype(int))
    halves = np.minimum(np.minimum(places, len(values) - 1 - places), series.window // 2)
    medians = [np.median(values[p - half : p + half + 1]) for p, half in zip(places, halves, strict=True)]
    return Series(series.name, series.known_steps[places], np.array(medians))


def gaps(series: Series) -> list[tuple[int, int]]:
    """Return the first and last step of each stretch of values that aren't finite."""
    missing = np.concatenate([[False], ~series.finite, [False]]).astype(np.int8)
    starts, ends = np.flatnonzero(np.diff(missing) == 1), np.flatnonzero(np.diff(missing) == -1) - 1
    return [(int(series.steps[a]), int(series.steps[b])) for a, b in zip(starts, ends, strict=True)]
