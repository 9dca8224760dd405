"""Which samples were used, as one number that no order and no split changes.

    digest(updates) = sum over their samples of mix(epoch, index)   modulo 2^40

Ranks add up their own shares, the vote adds up the ranks, a run its updates; and whoever knows seed and data can say
what the sum for any range of positions must be. A sample that is missing, double, or another one shows, but for one
case in 10^12.
"""

from __future__ import annotations

import numpy as np

MODULUS = 2**40  # sums over 8,192 ranks are exact in float64

_Indices = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def digests(epoch: int, indices: _Indices, own: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> list[int]:
    """Of each row of `indices` [updates, samples]; columns that aren't `own` (filler) don't count."""
    mixed = _mix(epoch, indices)
    found: list[int] = ((mixed * own).sum(axis=1, dtype=np.uint64) % MODULUS).tolist()
    return found


def digest(epoch: int, indices: _Indices) -> int:
    """Of these samples of one epoch."""
    return int(_mix(epoch, indices).sum(dtype=np.uint64) % MODULUS)


def _mix(epoch: int, indices: _Indices) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    """splitmix64 (Steele, Lea & Flood 2014, https://doi.org/10.1145/2660193.2660195) of index and epoch."""
    with np.errstate(over="ignore"):
        state = indices.astype(np.uint64) * np.uint64(2) + np.uint64(1)
        state += np.uint64(epoch % 2**32) * np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return (state ^ (state >> np.uint64(31))) % np.uint64(MODULUS)
