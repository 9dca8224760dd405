"""How the global batch, which the user sets, is split into micro-batches. Pure arithmetic.

    samples of one update    0 1 2 3 4 5 6 7 8 9          global batch of 10
    ranks (contiguous)       0 0 0 0|1 1 1|2 2 2          3 ranks: as even as possible
    micro-batches            0 0|0 0|1 1|1|2 2|2          micro size 2: accumulation 2 on every rank

Every rank runs the same number of micro-batches, so that none waits for a collective that another never starts. A rank
with too few samples runs padding: an empty range here, a batch without weight in the engine.

Where results must be bitwise identical on any number of ranks (`run.determinism: invariant`), the samples are split
into micro-batches first:

    micro-batches            0 0|1 1|2 2|3 3|4 4          5 of 2, the same on any number of ranks
    ranks (contiguous)       0      |1      |2  +padding  3 ranks
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

_MICRO_BATCHES_PER_STAGE = 4
"""A stage then waits for about a fifth of the time under 1f1b."""


@dataclass(frozen=True, slots=True)
class BatchPlan:
    """The split of the samples of an update into micro-batches.

    Attributes:
        global_size: Samples per update.
        micro_size: Samples per forward at most.
        accumulation: Micro-batches per rank and update.
        ranks: Size of the data axis.
        fixed: Micro-batches are the same on any number of ranks.
    """

    global_size: int
    micro_size: int
    accumulation: int
    ranks: int
    fixed: bool = False

    @property
    def even(self) -> bool:
        """True if all micro-batches of a full update are of the same size."""
        return self.global_size == self.micro_size * self.accumulation * self.ranks

    @property
    def waste(self) -> float:
        """Fraction of the ranks' time in a full update that is spent on padding or on waiting for a larger share."""
        if self.fixed:
            return 1 - _ceil(self.global_size, self.micro_size) / (self.accumulation * self.ranks)
        return 1 - self.global_size / (_ceil(self.global_size, self.ranks) * self.ranks)

    def ranges(self, samples: int, rank: int) -> list[tuple[int, int]]:
        """Return the [start, stop) of each micro-batch of `rank` within an update of `samples` samples.

        Every rank gets the same number of ranges; an empty one stands for padding.
        """
        if not self.fixed:
            return list(micro_ranges(samples, self.micro_size, rank, self.ranks))
        share = self.share(samples, rank)
        ranges = [_part(0, samples, number, share.terms) for number in range(share.first, share.stop)]
        end = ranges[-1][1] if ranges else samples
        return ranges + [(end, end)] * (_ceil(share.terms, self.ranks) - len(ranges))

    def share(self, samples: int, rank: int) -> Share:
        """Return which of an update's fixed micro-batches are those of `rank`."""
        return share_of(_ceil(samples, self.micro_size), rank, self.ranks)

    def product(self, ranks: int) -> str:
        """Return the sizes as text; if the run has more `ranks` than shares, several ranks have the same samples."""
        sign, last = "=" if self.even else "<", "ranks" if ranks == self.ranks else "shares"
        sizes = f"{self.micro_size} x {self.accumulation} x {self.ranks}"
        return f"{self.global_size} {sign} {sizes} (micro-batch x accumulation x {last})"


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's micro-batches [first, stop) of the `terms` of an update."""

    first: int
    stop: int
    terms: int


def share_of(terms: int, rank: int, ranks: int) -> Share:
    """Return the share of `rank` in an update of `terms` micro-batches."""
    return Share(*_part(0, terms, rank, ranks), terms)


def plan_batch(
    global_size: int, micro_size: int | Literal["auto"], ranks: int, *, fixed: bool = False, stages: int = 1
) -> BatchPlan:
    """Return the split of a global batch over the ranks that have samples of their own.

    Args:
        stages: Pipeline stages; an `auto` micro size gives enough micro-batches to keep all of them busy.
    """
    share = _ceil(global_size, ranks)
    if fixed:
        assert micro_size != "auto", "fixed micro-batches have a given size"
        micro = min(micro_size, global_size)
        return BatchPlan(global_size, micro, _ceil(_ceil(global_size, micro), ranks), ranks, fixed)
    if micro_size == "auto":
        micro_size = share if stages == 1 else _ceil(share, _MICRO_BATCHES_PER_STAGE * stages)
    micro = min(micro_size, share)
    return BatchPlan(global_size, micro, _ceil(share, micro), ranks)


def micro_ranges(samples: int, micro_size: int, rank: int, ranks: int) -> Iterator[tuple[int, int]]:
    """Yield the [start, stop) of each micro-batch of `rank`; sizes differ by one at most, an empty one is padding."""
    start, stop = _part(0, samples, rank, ranks)
    accumulation = max(1, _ceil(_ceil(samples, ranks), micro_size))
    return (_part(start, stop, index, accumulation) for index in range(accumulation))


def half(size: int) -> int:
    """Return the size of micro-batches of which there are twice as many."""
    return _ceil(size, 2)


def smallest_micro_batch(samples: int, micro_size: int, ranks: int) -> int:
    """Return the samples of the smallest micro-batch of an update of `samples` samples, on any rank."""
    accumulation = max(1, _ceil(_ceil(samples, ranks), micro_size))
    return samples // ranks // accumulation


def nearest_even_sizes(global_size: int, micro_size: int, ranks: int) -> tuple[int, int]:
    """Return the global sizes nearest to `global_size`, below (or equal) and above, that fill all micro-batches."""
    unit = micro_size * ranks
    below = global_size // unit * unit
    return (max(unit, below), below + unit)


def _part(start: int, stop: int, index: int, parts: int) -> tuple[int, int]:
    """Return part `index` of [start, stop) split into `parts`, the larger parts first."""
    size, larger = divmod(stop - start, parts)
    first = start + index * size + min(index, larger)
    return first, first + size + (index < larger)


def _ceil(number: int, divisor: int) -> int:
    return -(-number // divisor)
