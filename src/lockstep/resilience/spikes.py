"""Finds spikes: a loss or a gradient norm far above those of the updates before.

    limit = median + threshold x max(1.4826 x median absolute deviation, 1 % of the median)

    update    1 ......... window + 1   window + 2 .........
              never a spike            a spike if loss > its limit, or norm > its limit

The median and the deviation are those of the last `window` kept updates, without the update just before: on an
accelerator its numbers may not have arrived yet, and every device must decide alike. The numbers are the same on all
ranks, and so are the limits.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from lockstep.core.formatting import value

_NORMAL = 1.4826  # x the median absolute deviation is the standard deviation of a normal distribution
_LEAST = 0.01  # of the median: numbers that hardly vary have no spikes of a few permille
_ARRIVED = 2  # the newest update that counts for update k is k - 2


class Limits(NamedTuple):
    """The numbers above which an update is a spike."""

    loss: float = math.inf
    norm: float = math.inf

    def reason(self, loss: float, norm: float) -> str:
        """Return which number is above its limit, as text; empty if none is."""
        if loss > self.loss:
            return f"loss {value(loss)}, limit {value(self.loss)}"
        return f"gradient norm {value(norm)}, limit {value(self.norm)}" if norm > self.norm else ""


NO_LIMITS = Limits()


class Spikes:
    """The losses and gradient norms of the last kept updates, and the limits that follow from them."""

    def __init__(self, window: int, threshold: float) -> None:
        self._losses = _Recent(window, threshold)
        self._norms = _Recent(window, threshold)
        self._steps: deque[int] = deque(maxlen=window)
        self._waiting: deque[tuple[int, float, float]] = deque()

    def limits(self, step: int) -> Limits:
        """Return the limits of update `step`, from the updates up to `step` - 2."""
        while self._waiting and self._waiting[0][0] <= step - _ARRIVED:
            number, loss, norm = self._waiting.popleft()
            self._steps.append(number)
            self._losses.add(loss)
            self._norms.add(norm)
        return Limits(self._losses.limit(), self._norms.limit())

    def see(self, step: int, loss: float, norm: float) -> None:
        """Add the numbers of a kept update."""
        self._waiting.append((step, loss, norm))

    def state(self) -> list[list[float]]:
        """Return [step, loss, norm] of the updates that count, or soon will."""
        counted = zip(self._steps, self._losses.numbers, self._norms.numbers, strict=True)
        return [[*numbers] for numbers in (*counted, *self._waiting)]

    def restore(self, state: Iterable[Iterable[float]]) -> None:
        """Continue from what `state` returned."""
        for recent in (self._losses, self._norms):
            recent.clear()
        self._steps.clear()
        self._waiting = deque((int(step), loss, norm) for step, loss, norm in state)


class _Recent:
    """The last numbers of a series, by age and by size: adding one and the limit take 3 us together."""

    def __init__(self, window: int, threshold: float) -> None:
        self._window = window
        self._threshold = threshold
        self.numbers: deque[float] = deque()
        self._sorted: list[float] = []

    def clear(self) -> None:
        self.numbers.clear()
        self._sorted.clear()

    def add(self, number: float) -> None:
        if len(self.numbers) == self._window:
            del self._sorted[bisect_left(self._sorted, self.numbers.popleft())]
        self.numbers.append(number)
        insort(self._sorted, number)

    def limit(self) -> float:
        """Return the limit; infinity until the window is full."""
        if len(self.numbers) < self._window:
            return math.inf
        middle = self._window // 2
        median = self._sorted[middle]
        return median + self._threshold * max(_NORMAL * self._deviation(middle), _LEAST * abs(median))

    def _deviation(self, middle: int) -> float:
        """Return the median absolute deviation: how far the half of all numbers that is nearest to the median is."""
        numbers, median = self._sorted, self._sorted[middle]

        def reach(low: int) -> float:
            """Return the largest deviation of the numbers at `low` to `low` + `middle`."""
            return max(numbers[low + middle] - median, median - numbers[low])

        last = self._window - 1 - middle
        low = bisect_left(range(last), 0.0, key=lambda low: numbers[low + middle] + numbers[low] - 2 * median)
        return min(reach(low), reach(max(0, low - 1)))
