"""A curve's numbers, and less of them: what is worth drawing of a million, and what runs through their noise.

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
_NOISY = 120  # values from which on a running median says more than the values
_LARGEST = 1e150  # what is beyond is drawn there: differences must not overflow
_SMALLEST = 1e-150  # what is nearer to zero is zero: nor may they vanish


@dataclass(frozen=True, slots=True)
class Series:
    """Attributes:
    name: what the legend calls it.
    steps: ascending, each once.
    values: as many; NaN where there is none that is finite.
    noisy: whether a running median may stand for it.
    colour: what belongs together has the same number in every chart.
    """

    name: str
    steps: Numbers
    values: Numbers
    noisy: bool = False
    colour: int = 0

    @classmethod
    def of(cls, name: str, steps: Collection[float] | Numbers, values: Collection[float] | Numbers) -> Series:
        """From numbers in any order, of which the last one of a step counts; what isn't finite becomes NaN."""
        return cls(name, *_in_order(_numbers(steps), _numbers(values)))

    @property
    def finite(self) -> NDArray[np.bool_]:
        return np.isfinite(self.values)

    @property
    def known(self) -> Numbers:
        """The finite values."""
        return self.values[self.finite]

    @property
    def is_smoothed(self) -> bool:
        """Whether it is drawn as a running median over what was logged."""
        return self.noisy and len(self.known) >= _NOISY

    def last(self) -> tuple[int, float]:
        """Step and value of the last finite one, of which there must be one."""
        index = np.flatnonzero(self.finite)[-1]
        return int(self.steps[index]), float(self.values[index])


def _numbers(values: Collection[float] | Numbers) -> Numbers:
    return values if isinstance(values, np.ndarray) else np.array(list(values), np.float64)


def _in_order(steps: Numbers, values: Numbers) -> tuple[Numbers, Numbers]:
    values = np.clip(np.where(np.isfinite(values), values, np.nan), -_LARGEST, _LARGEST)
    values[np.abs(values) < _SMALLEST] = 0.0
    if len(steps) > 1 and not (np.diff(steps) > 0).all():
        _, from_the_end = np.unique(steps[::-1], return_index=True)
        steps, values = steps[::-1][from_the_end], values[::-1][from_the_end]
    return steps, values


def thin(steps: Numbers, values: Numbers, buckets: int) -> NDArray[np.intp]:
    """Indices of what is worth drawing: of each bucket along the steps the first, last, lowest and highest value, and
    one that isn't finite. Few values are all worth it.

    The line through them covers the same pixels as that through all (M4; Jugel et al. 2014, PVLDB 7(10), section 4).
    """
    if len(steps) <= 4 * buckets:
        return np.arange(len(steps))
    places = np.floor((steps - steps[0]) / (steps[-1] - steps[0]) * buckets)
    bounds = [0, *(np.flatnonzero(np.diff(places)) + 1).tolist(), len(steps)]
    return np.unique([start + index for start, end in pairwise(bounds) for index in _telling(values[start:end])])


def _telling(values: Numbers) -> set[int]:
    finite = np.isfinite(values)
    ends = {0, len(values) - 1}
    if not finite.any():
        return ends
    extremes = {int(np.nanargmin(values)), int(np.nanargmax(values))}
    return ends | extremes | (set() if finite.all() else {int(np.argmin(finite))})


def running_median(series: Series, points: int = _MEDIANS) -> Series:
    """The median over a window (`window`) of finite values, at so many of them.

    Towards the ends the window shrinks evenly to both sides, so the curve begins and ends where the values do.
    """
    steps, values = series.steps[series.finite], series.known
    reach = window(series) // 2
    places = np.unique(np.linspace(0, len(values) - 1, min(points, len(values))).round().astype(int))
    halves = np.minimum(np.minimum(places, len(values) - 1 - places), reach)
    medians = [np.median(values[p - half : p + half + 1]) for p, half in zip(places, halves, strict=True)]
    return Series(series.name, steps[places], np.array(medians))


def window(series: Series) -> int:
    """Values that a running median looks at: a twenty-fifth of all, and an odd number."""
    return 2 * max(1, len(series.known) // 50) + 1


def gaps(series: Series) -> list[tuple[int, int]]:
    """First and last step of each stretch of values that aren't finite."""
    missing = np.concatenate([[False], ~series.finite, [False]]).astype(np.int8)
    starts, ends = np.flatnonzero(np.diff(missing) == 1), np.flatnonzero(np.diff(missing) == -1) - 1
    return [(int(series.steps[a]), int(series.steps[b])) for a, b in zip(starts, ends, strict=True)]
