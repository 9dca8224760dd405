"""Whole documents into samples of a fixed length, with next to nothing left empty: best fit, longest first.

    lengths    7 5 4 3 3 2 1 ...           capacity 10
    samples    [7 3] [5 4 1] [3 2 ...]     each document into the fullest sample that still has room for it

Best-fit decreasing needs no more of a document than its length, so all documents of one length are placed at once, and
so are all samples with the same room left. The work grows with the number of different lengths (the capacity at most),
not with the number of documents: that is what makes it quick. Documents longer than a sample are cut first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Packing:
    """The pieces of the stream that lie in each sample.

    Attributes:
        starts: [pieces] where each piece begins in the stream of tokens, ordered by sample.
        lengths: [pieces] its tokens.
        bounds: [samples + 1] sample s holds pieces bounds[s] .. bounds[s + 1].
        capacity: tokens that a sample can hold.
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
        """The share of all places that stay empty."""
        return 1 - int(self.lengths.sum()) / max(1, self.samples * self.capacity)


def pack(offsets: Integers, capacity: int) -> Packing:
    """Pack the documents that lie between `offsets` [documents + 1] of a stream."""
    starts, lengths = _cut(offsets, capacity)
    keys = (capacity - lengths).astype(np.min_scalar_type(capacity))  # few bits: a radix sort
    longest_first = np.argsort(keys, kind="stable")
    samples = _place(np.bincount(lengths, minlength=capacity + 1), capacity)
    by_sample = np.argsort(samples, kind="stable")
    pieces = longest_first[by_sample]
    bounds = np.concatenate([[0], np.cumsum(np.bincount(samples))]) if len(samples) else np.zeros(1, np.int64)
    return Packing(starts[pieces], lengths[pieces], bounds, capacity)


def _cut(offsets: Integers, capacity: int) -> tuple[Integers, Integers]:
    """Return start and length of each piece: documents, those longer than a sample in pieces of its length."""
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
    """Return the sample of each piece, longest first, given how many pieces there are of each length."""
    placed: list[Integers] = []
    open_samples: dict[int, list[Integers]] = {}  # room left -> samples with just that room
    rooms: list[int] = []  # the keys, sorted
    new = 0
    for length in range(capacity, 0, -1):
        left = int(counts[length])
        while left:
            fit = bisect_left(rooms, length)
            if fit == len(rooms):  # none has room: open as many as it takes, all alike
                fresh = -(-left // (capacity // length))
                samples, room = np.arange(new, new + fresh), capacity
                new += fresh
            else:
                room = rooms.pop(fit)
                samples = np.concatenate(open_samples.pop(room))
            left -= _fill(samples, room, length, left, placed, open_samples, rooms)
    return np.concatenate(placed) if placed else np.zeros(0, np.int64)


def _fill(
    samples: Integers,
    room: int,
    length: int,
    left: int,
    placed: list[Integers],
    open_samples: dict[int, list[Integers]],
    rooms: list[int],
) -> int:
    """Put up to `left` pieces into the samples, each filled before the next; return how many."""

    def reopen(some: Integers, space: int) -> None:
        if len(some) == 0 or space == 0:
            return
        if space not in open_samples:
            open_samples[space] = []
            insort(rooms, space)
        open_samples[space].append(some)

    each = room // length
    full = min(len(samples), left // each)
    filled, rest = samples[:full], samples[full:]
    placed.append(np.repeat(filled, each) if each > 1 else filled)
    reopen(filled, room - each * length)
    extra = min(left - full * each, each) if len(rest) else 0
    if extra:
        placed.append(np.repeat(rest[:1], extra))
        reopen(rest[:1], room - extra * length)
        rest = rest[1:]
    reopen(rest, room)
    return full * each + extra
