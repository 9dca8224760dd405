"""The order of an epoch: a keyed permutation, computed where it is needed and never stored.

    position in the epoch --> [ rounds keyed by (seed, epoch) ] --> index of a sample

    0 .. N-1 laid out as a grid of `rows` x `columns` >= N cells, each position a pair (row, column):

        row    <- (row    + mix(column, key of the round)) mod rows        even rounds
        column <- (column + mix(row,    key of the round)) mod columns     odd rounds

A Feistel network over a grid instead of bits (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002):
each round is invertible, so the whole is a bijection of the grid. A position that lands beyond N is permuted again,
which makes it a bijection of 0 .. N-1. The world size has no influence.

The samples that were used are recorded in a number that doesn't depend on order or split:

    digest(updates) = sum over their samples of splitmix(epoch, index)   modulo 2^40

With seed and data it can be computed for any range of positions. A missing, repeated or wrong sample changes it, except
in one case of 10^12.
"""

from __future__ import annotations

import hashlib
import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from lockstep.core.keys import key

Indices = NDArray[np.int64]

_ROUNDS = 8
_HALF = np.uint64(32)
_SHIFTS = tuple(np.uint64(shift) for shift in (30, 27, 31))
_FACTORS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


class SampleOrder:
    """The order of the samples in each epoch: a new permutation each, if shuffled."""

    def __init__(self, samples: int, seed: int, *, shuffle: bool = True) -> None:
        assert 0 < samples < 2**62
        self.samples = samples
        self.seed = seed
        self.shuffle = shuffle

    def indices(self, epoch: int, positions: Indices) -> Indices:
        """Return the samples at `positions` (any shape, each in [0, N)) of `epoch`; of the same shape."""
        if not self.shuffle:
            return positions
        keys, size = _round_keys(self.seed, epoch), self.samples
        rows = max(1, math.isqrt(size - 1) + 1)
        columns = -(-size // rows)
        cells = _permute(positions.astype(np.uint64), rows, columns, keys)
        outside = np.flatnonzero(cells >= size)
        flat = cells.reshape(-1)
        while outside.size:
            flat[outside] = _permute(flat[outside], rows, columns, keys)
            outside = outside[flat[outside] >= size]
        return cells.view(np.int64)


def mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Apply SplitMix64's finalizer in place, which spreads each bit over all 64, and return `x`.

    Steele, Lea, Flood, "Fast Splittable Pseudorandom Number Generators", OOPSLA 2014.
    """
    x ^= x >> _SHIFTS[0]
    x *= _FACTORS[0]
    x ^= x >> _SHIFTS[1]
    x *= _FACTORS[1]
    x ^= x >> _SHIFTS[2]
    return x


def _permute(cells: NDArray[np.uint64], rows: int, columns: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    width = np.uint64(columns)
    row, column = np.divmod(cells, width)
    sizes = (np.uint64(rows), width)
    for number, round_key in enumerate(keys):
        if number % 2 == 0:
            _add_modulo(row, _draw(column, round_key, sizes[0]), sizes[0])
        else:
            _add_modulo(column, _draw(row, round_key, sizes[1]), sizes[1])
    row *= width
    row += column
    return row


def _draw(values: NDArray[np.uint64], round_key: np.uint64, size: np.uint64) -> NDArray[np.uint64]:
    """Return a number in [0, size) for each value: the upper half of its mix, scaled."""
    x = mix(values + round_key)
    x >>= _HALF
    x *= size
    x >>= _HALF
    return x


def _add_modulo(values: NDArray[np.uint64], summands: NDArray[np.uint64], size: np.uint64) -> None:
    """Add in place; both are below `size`.

    A sum below `size` wraps to a huge number when `size` is subtracted, so the smaller of both is the remainder.
    """
    values += summands
    np.minimum(values, values - size, out=values)


@lru_cache(maxsize=8)
def _round_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    return np.array([key(seed, "order", epoch, number) for number in range(_ROUNDS)], dtype=np.uint64)


MODULUS = 2**40  # sums over 8,192 ranks are exact in float64


def digests(epoch: int, indices: Indices, counted: NDArray[np.bool_]) -> list[int]:
    """Return the digest of each row of `indices` [updates, samples], over the `counted` columns."""
    sums: list[int] = ((_sample_digests(epoch, indices) * counted).sum(axis=1, dtype=np.uint64) % MODULUS).tolist()
    return sums


def digest(epoch: int, indices: Indices) -> int:
    """Return the digest of these samples of one epoch."""
    return int(_sample_digests(epoch, indices).sum(dtype=np.uint64) % MODULUS)


def _sample_digests(epoch: int, indices: Indices) -> NDArray[np.uint64]:
    with np.errstate(over="ignore"):
        state = indices.astype(np.uint64) * np.uint64(2) + np.uint64(1)
        state += np.uint64(epoch % 2**32) * np.uint64(0x9E3779B97F4A7C15)
        return mix(state) % np.uint64(MODULUS)


def fingerprint(*parts: object) -> str:
    """Return the BLAKE2b hash of the parts that define a dataset's content: arrays by bytes, others by their repr."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        if isinstance(part, np.ndarray):
            digest.update(f"{part.dtype.str}{part.shape}".encode())
            digest.update(np.ascontiguousarray(part).data)
        else:
            digest.update(repr(part).encode())
        digest.update(b"\x1f")
    return digest.hexdigest()
