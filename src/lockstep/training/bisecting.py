"""Searches the samples of a bad update for the one that makes it so, on halves of them.

samples of the update    1 2 3 4 5 6 7 8        nan
                         1 2 3 4 | 5 6 7 8      finite | nan
                                   5 6 | 7 8    nan    |
                                   5 | 6        finite | nan       sample 6, if it is bad alone
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence


def worst_sample(samples: Sequence[int], badness: Callable[[Sequence[int]], float], *, finite: bool) -> int | None:
    """Return the sample that makes samples bad; None if the one that the search ends at isn't bad alone.

    Args:
        badness: Computes a part of the samples; returns infinity if its numbers aren't finite, a number above 0 if they
            are bad.
        finite: Whether the numbers of all samples are finite: the half with the larger ones is searched then.
    """
    while len(samples) > 1:
        first, second = samples[: len(samples) // 2], samples[len(samples) // 2 :]
        of_first = badness(first)
        is_first = of_first >= badness(second) if finite else of_first == math.inf
        samples = first if is_first else second
    return samples[0] if samples and badness(samples) > 0 else None
