"""Pack whole documents into samples of a fixed length, almost without padding: best fit, longest first.

    lengths    7 5 4 3 3 2 1 ...           capacity 10
    samples    [7 3] [5 4 1] [3 2 ...]     each document into the fullest sample that still has space for it

Best-fit decreasing depends only on lengths, so all documents of one length are placed at once, into all samples with
the same space left. The time grows with the number of different lengths (the capacity at most), not with the number of
documents. Documents longer than a sample are cut first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Packing:
    """The pieces of the stream in each sample.

    Attributes:
        starts: [pieces] Where each piece begins in the stream of tokens, ordered by sample.
        lengths: [pieces] The number of its tokens.
        bounds: [samples + 1] Sample s holds pieces bounds[s] .. bounds[s + 1].
        capacity: Number of tokens that a sample can hold.
    """

    starts: Integers
    lengths: Integers
    bounds: Integers
    capacity: int

    @property
    def samples(self) -> int:
        return len(self.bounds) - 1

    @property
    def padding(self) -> float:
        """The fraction of all positions that stay empty."""
        return 1 - int(self.lengths.sum()) / max(1, self.samples * self.capacity)


def pack(offsets: Integers, capacity: int) -> Packing:
    """Pack the documents between the `offsets` [documents + 1] of a stream."""
    starts, lengths = _cut(offsets, capacity)
    keys = (capacity - lengths).astype(np.min_scalar_type(capacity))  # few bits: a radix sort
    longest_first = np.argsort(keys, kind="stable")
    samples = _place(np.bincount(lengths, minlength=capacity + 1), capacity)
    by_sample = np.argsort(samples, kind="stable")
    pieces = longest_first[by_sample]
    bounds = np.concatenate([[0], np.cumsum(np.bincount(samples))]) if len(samples) else np.zeros(1, np.int64)
    return Packing(starts[pieces], lengths[pieces], bounds, capacity)


def _cut(offsets: Integers, capacity: int) -> tuple[Integers, Integers]:
    """Return start and length of each piece: a document, or a part of a document that is longer than a sample."""
    lengths = np.diff(offsets)
    pieces = -(-lengths // capacity)
    if len(pieces) == 0 or pieces.max() <= 1:
        kept = lengths > 0
        return (offsets[:-1], lengths) if kept.all() else (offsets[:-1][kept], lengths[kept])
    documents = np.repeat(np.arange(len(lengths)), pieces)
    number = np.arange(len(documents)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = offsets[documents] + number * capacity
    return starts, np.minimum(capacity, offsets[documents + 1] - starts)


def _place(counts: Integers, capacity: int) -> Integers:
    """Return the sample of each piece, longest first, given the number of pieces of each length."""
    placed: list[Integers] = []
    open_samples = _OpenSamples(capacity)
    for length in range(capacity, 0, -1):
        left = int(counts[length])
        while left:
            samples, space = open_samples.take(length, left)
            each = space // length
            num_full = min(len(samples), left // each)
            full, rest = samples[:num_full], samples[num_full:]
            placed.append(np.repeat(full, each) if each > 1 else full)
            open_samples.put(full, space - each * length)
            left -= num_full * each
            extra = min(left, each) if len(rest) else 0  # for the last sample, which they don't fill
            if extra:
                placed.append(np.repeat(rest[:1], extra))
                open_samples.put(rest[:1], space - extra * length)
                rest = rest[1:]
                left -= extra
            open_samples.put(rest, space)
    return np.concatenate(placed) if placed else np.zeros(0, np.int64)


class _OpenSamples:
    """Samples that aren't full, by the space left in them."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._opened = 0
        self._samples: dict[int, list[Integers]] = {}
        self._spaces: list[int] = []  # the keys, sorted

    def take(self, length: int, pieces: int) -> tuple[Integers, int]:
        """Remove and return the fullest samples with space for `length`, and that space; new ones if there are none."""
        fit = bisect_left(self._spaces, length)
        if fit < len(self._spaces):
            space = self._spaces.pop(fit)
            return np.concatenate(self._samples.pop(space)), space
        first = self._opened
        self._opened += -(-pieces // (self._capacity // length))
        return np.arange(first, self._opened), self._capacity

    def put(self, samples: Integers, space: int) -> None:
        if len(samples) == 0 or space == 0:
            return
        if space not in self._samples:
            self._samples[space] = []
            insort(self._spaces, space)
        self._samples[space].append(samples)
