"""Axes: their range, the round numbers on them, and how these are written.

0.31 ... 4.87   --fitted-->   Scale(0, 5, step 1)   --ticks-->   0  1  2  3  4  5
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from lockstep.core import formatting
from lockstep.report.series import Numbers

Unit = Literal["plain", "percent", "rate"]

_STEEP = 20.0  # largest value over the median from which on a logarithmic scale shows more
_NEAR_ZERO = 0.35  # lowest value over the largest up to which the axis begins at zero
_DECADES = 12  # of a logarithmic scale, at most


@dataclass(frozen=True, slots=True)
class Scale:
    """An axis from `low` at the bottom to `high` at the top.

    Attributes:
        step: between its ticks; None on a logarithmic scale.
    """

    low: float
    high: float
    step: float | None

    @property
    def is_logarithmic(self) -> bool:
        return self.step is None

    def heights(self, values: Numbers) -> Numbers:
        """Return 0 for the bottom, 1 for the top; NaN stays NaN, and values outside are at the edge."""
        inside = np.clip(values, self.low, self.high)
        if self.is_logarithmic:
            return np.asarray(np.log(inside / self.low) / math.log(self.high / self.low))
        return np.asarray((inside - self.low) / (self.high - self.low))


def fitted(
    values: Numbers, *, from_zero: bool = False, may_be_logarithmic: bool = False, most: float = math.inf
) -> Scale:
    """Return a scale that shows all values: at least one, all finite.

    It begins at a tick, and ends at one or half a step beyond; at `most` if no value is larger.
    """
    low, high = float(values.min()), float(values.max())
    if may_be_logarithmic and low > 0 and high > _STEEP * float(np.median(values)):
        low = max(low, high * 10.0**-_DECADES)
        below, above = 10.0 ** math.floor(math.log10(low)), 10.0 ** math.floor(math.log10(high))
        return Scale(
            max(factor * below for factor in (1, 2, 5) if factor * below <= low * (1 + 1e-9)),
            min(factor * above for factor in (1, 2, 5, 10) if factor * above >= high * (1 - 1e-9)),
            step=None,
        )
    if from_zero or 0 < low < _NEAR_ZERO * high:
        low = min(low, 0.0)
    if high - low <= 1e-6 * max(abs(low), abs(high)):  # all alike: in the middle
        margin = abs(high) / 2 or 1.0
        low, high = low - margin, high + margin if high > most else min(high + margin, most)
    step = _round_step(high - low, 4)
    return Scale(step * math.floor(low / step + 1e-6), step * math.ceil(2 * high / step - 1e-6) / 2, step)


def ticks(scale: Scale) -> list[float]:
    """Return about four round values, or the powers of ten."""
    if scale.step is not None:
        lowest, highest = round(scale.low / scale.step), math.floor(scale.high / scale.step + 1e-6)
        return [number * scale.step for number in range(lowest, highest + 1)]
    first, last = math.floor(math.log10(scale.low) + 1e-9), math.ceil(math.log10(scale.high) - 1e-9)
    factors = (1, 2, 5) if scale.high <= 100.1 * scale.low else (1,)
    powers = range(first, last + 1, math.ceil((last - first) / 7))
    values = [factor * 10.0**power for power in powers for factor in factors]
    return [value for value in values if scale.low * (1 - 1e-9) <= value <= scale.high * (1 + 1e-9)]


def step_ticks(first: int, last: int) -> list[int]:
    """Return about five round steps between the two."""
    step = max(1, round(_round_step(max(1, last - first), 5)))
    return list(range(-(-first // step) * step, last + 1, step))


def value_text(value: float, unit: Unit) -> str:
    """Return a value as people read it, in legends and under the pointer."""
    if not math.isfinite(value):
        return "not finite"
    if unit == "percent":
        return f"{100 * value:.2f} %"
    return formatting.short(value) if unit == "rate" else formatting.value(value)


def tick_labels(values: Sequence[float], unit: Unit) -> list[str]:
    """Return labels as short as they can be while no two are the same: 0.5, 1.0; 2,500; 20k; 3e-4; 98 %."""
    if unit == "percent":
        return [label + " %" for label in tick_labels([100 * value for value in values], "plain")]
    short = [_trimmed(formatting.short(value)) for value in values]
    if max(map(abs, values), default=0.0) >= 10_000 and len(set(short)) == len(short):
        return short
    nine_digits = [f"{value:.9g}" for value in values]
    decimals = max((len(text.partition(".")[2]) for text in nine_digits), default=0)
    is_even = len(values) < 3 or math.isclose(values[1] - values[0], values[-1] - values[-2], rel_tol=1e-6)
    if decimals <= 4 and is_even and not any("e" in text for text in nine_digits):
        return [f"{value:,.{decimals}f}" if value else "0" for value in values]
    return [_brief(value) for value in values]


def _round_step(length: float, number: int) -> float:
    """Return 1, 2 or 5 times a power of ten, so that about `number` of them make up `length`."""
    rough = length / number
    power = 10.0 ** math.floor(math.log10(rough))
    return float(min((factor * power for factor in (1, 2, 5, 10)), key=lambda step: abs(math.log(step / rough))))


def _brief(value: float) -> str:
    """Return 3e-4, not 0.0003 or 3e-04."""
    if value == 0 or abs(value) >= 1e-3:
        return f"{value:,.9g}"
    mantissa, power = f"{value:.8e}".split("e")
    return f"{_trimmed(mantissa)}e{int(power)}"


def _trimmed(text: str) -> str:
    """Return 1.5M for 1.50M."""
    number = text.rstrip("TGMk")
    return (number.rstrip("0").rstrip(".") if "." in number else number) + text[len(number) :]
