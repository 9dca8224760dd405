"""The global batch is the user's contract; how it is cut is arithmetic.

    samples of one update    0 1 2 3 4 5 6 7 8 9          global batch of 10
    ranks (contiguous)       0 0 0 0|1 1 1|2 2 2          3 ranks: as even as can be
    micro-batches            0 0|0 0|1 1|1|2 2|2          micro size 2: accumulation 2 on every rank

Every rank runs as many micro-batches, so that none waits for a collective that another never starts. A rank with
too few samples for that runs filler: an empty range here, a batch without weight in the engine.

Where bits must not depend on the ranks (`run.determinism: invariant`), micro-batches come first:

    micro-batches            0 0|1 1|2 2|3 3|4 4          5 of 2, the same on any number of ranks
    ranks (contiguous)       0      |1      |2  +filler   3 ranks
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

_MICRO_BATCHES_PER_STAGE = 4
"""A stage waits for about a fifth of the time then, under 1f1b."""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """Attributes:
    global_size: samples per update.
    micro_size: samples per forward at most.
    accumulation: micro-batches per rank and update.
    ranks: of the data axis.
    fixed: micro-batches are cut first, and alike whatever the ranks.
    """

    global_size: int
    micro_size: int
    accumulation: int
    ranks: int
    fixed: bool = False

    @property
    def even(self) -> bool:
        """Whether all micro-batches of a full update are of the same size."""
        return self.global_size == self.micro_size * self.accumulation * self.ranks

    @property
    def waste(self) -> float:
        """Share of the ranks' time in a full update that is spent on filler or on waiting for a larger share."""
        if self.fixed:
            return 1 - _ceil(self.global_size, self.micro_size) / (self.accumulation * self.ranks)
        return 1 - self.global_size / (_ceil(self.global_size, self.ranks) * self.ranks)

    def ranges(self, samples: int, rank: int) -> list[tuple[int, int]]:
        """The [start, stop) of each micro-batch of `rank` within an update of `samples` samples; as many on every rank,
        an empty one asks for filler."""
        if not self.fixed:
            return micro_ranges(samples, self.micro_size, rank, self.ranks)
        share = self.share(samples, rank)
        cut = [_part(0, samples, number, share.terms) for number in range(share.first, share.stop)]
        end = cut[-1][1] if cut else samples
        return cut + [(end, end)] * (_ceil(share.terms, self.ranks) - len(cut))

    def share(self, samples: int, rank: int) -> Share:
        """Which of an update's micro-batches are those of `rank`, if they are `fixed`."""
        return share_of(_ceil(samples, self.micro_size), rank, self.ranks)

    def among(self, ranks: int) -> str:
        """The product in words; of what is cut, several of the run's `ranks` have one share."""
        sign, last = "=" if self.even else "<", "ranks" if ranks == self.ranks else "shares"
        product = f"{self.micro_size} x {self.accumulation} x {self.ranks}"
        return f"{self.global_size} {sign} {product} (micro-batch x accumulation x {last})"

    def __str__(self) -> str:
        return self.among(self.ranks)


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's micro-batches [first, stop) of the `terms` of an update."""

    first: int
    stop: int
    terms: int


def share_of(terms: int, rank: int, ranks: int) -> Share:
    """What `rank` has of an update of `terms` micro-batches."""
    return Share(*_part(0, terms, rank, ranks), terms)


def plan_batch(
    global_size: int, micro_size: int | Literal["auto"], ranks: int, *, fixed: bool = False, stages: int = 1
) -> BatchPlan:
    """Derives the accumulation from global size, micro size and the ranks that have samples of their own.

    Args:
        stages: that micro-batches go through: an `auto` micro size then gives enough of them to keep all stages busy.
    """
    share = _ceil(global_size, ranks)
    if fixed:
        assert micro_size != "auto", "what is cut alike on any ranks has a size of its own"
        micro = min(micro_size, global_size)
        return BatchPlan(global_size, micro, _ceil(_ceil(global_size, micro), ranks), ranks, fixed)
    if micro_size == "auto":
        micro_size = share if stages == 1 else _ceil(share, _MICRO_BATCHES_PER_STAGE * stages)
    micro = min(micro_size, share)
    return BatchPlan(global_size, micro, _ceil(share, micro), ranks)


def micro_ranges(samples: int, micro_size: int, rank: int, ranks: int) -> list[tuple[int, int]]:
    """The [start, stop) of each micro-batch of `rank` within an update of `samples` samples.

    As many ranges on every rank; sizes differ by one at most; an empty range asks for filler.
    """
    start, stop = _part(0, samples, rank, ranks)
    accumulation = max(1, _ceil(_ceil(samples, ranks), micro_size))
    return [_part(start, stop, index, accumulation) for index in range(accumulation)]


def nearest_even_sizes(global_size: int, micro_size: int, ranks: int) -> tuple[int, int]:
    """The global sizes next to `global_size`, below (or equal) and above, that fill all micro-batches."""
    unit = micro_size * ranks
    below = global_size // unit * unit
    return (max(unit, below), below + unit)


def _part(start: int, stop: int, index: int, parts: int) -> tuple[int, int]:
    """Part `index` of [start, stop) cut into `parts`, the larger parts first."""
    size, larger = divmod(stop - start, parts)
    first = start + index * size + min(index, larger)
    return first, first + size + (index < larger)


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)
