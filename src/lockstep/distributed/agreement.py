"""A number that all ranks should have alike, compared in a sum over ranks: one outlier among 1,024 shows as among 2.

    x --> cell of ln x on a grid --> two integers below 2^14 --> each, and its square, summed exactly in float64

    all in one cell      n x sum of squares = (sum)^2, exactly
    anything else        larger

Two grids are compared, the second moved by half a cell: numbers closer than half a cell (2e-5 of them) share a cell of
one of them at least, and numbers further apart than a cell (4e-5) of none. Exact for up to 2^24 ranks.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

_CELL = 4e-5  # of ln x; squared norms of one gradient differ by 2e-5 at most, on all hardware
_ORIGIN = 20_000_000.0  # below all logarithms of float64, in cells
_PART = 1 << 14  # cells are below its square
_NOT_FINITE, _ZERO = 0.0, 1.0  # instead of a cell
SLOTS = 8
"""Numbers to sum over ranks."""


def slots_of(number: float) -> tuple[float, ...]:
    """Return the numbers that stand for one of a rank, which ranks sum."""
    if not math.isfinite(number) or number <= 0.0:
        first = second = _ZERO if number == 0.0 else _NOT_FINITE
    else:
        place = math.log(number) / _CELL + _ORIGIN
        first, second = math.floor(place), math.floor(place + 0.5)
    parts = (*map(float, divmod(first, _PART)), *map(float, divmod(second, _PART)))
    return (*parts, *map(operator.mul, parts, parts))


def slots_on_device(number: Tensor) -> Tensor:
    """Return the same [SLOTS] of a 0-dim float64 tensor, without a wait of the host."""
    usable = number.isfinite() & (number > 0)
    place = torch.where(usable, number, 1.0).log() / _CELL + _ORIGIN
    other = torch.where(number == 0, _ZERO, _NOT_FINITE)
    cells = torch.where(usable, torch.stack([place, place + 0.5]).floor(), other)
    high = (cells / _PART).floor()
    parts = torch.stack([high, cells - high * _PART], dim=1).view(-1)
    return torch.cat([parts, parts * parts])


def agree(sums: Sequence[float], ranks: int) -> bool:
    """Return whether all ranks had the same number, given the sums over ranks of their slots."""
    high, low, high_moved, low_moved, *squares = map(int, sums)
    if ranks * squares[0] == high * high and ranks * squares[1] == low * low:
        return True
    return ranks * squares[2] == high_moved * high_moved and ranks * squares[3] == low_moved * low_moved
