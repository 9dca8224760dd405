"""Arithmetic of intervals of time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]
"""Begin and end."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the intervals in order, with those that overlap or touch merged."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """Return the sum of the lengths."""
    return sum(end - begin for begin, end in intervals)


def intersection(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Return where two merged lists of intervals overlap."""
    shared, place = [], 0
    for begin, end in first:
        while place < len(second) and second[place][1] <= begin:
            place += 1
        for other_begin, other_end in second[place:]:
            if other_begin >= end:
                break
            shared.append((max(begin, other_begin), min(end, other_end)))
    return shared


def gaps(intervals: Sequence[Interval], whole: Interval) -> list[Interval]:
    """Return what merged intervals leave of a whole."""
    begins = [whole[0], *(end for _, end in intervals)]
    ends = [*(begin for begin, _ in intervals), whole[1]]
    return [(begin, end) for begin, end in zip(begins, ends, strict=True) if end > begin]
