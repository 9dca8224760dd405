"""How the global batch, which the user sets, is split into micro-batches. Pure arithmetic.

    samples of one step      0 1 2 3 4 5 6 7 8 9          global batch of 10
    ranks (contiguous)       0 0 0 0|1 1 1|2 2 2          3 ranks: as even as possible
    micro-batches            0 0|0 0|1 1|1|2 2|2          micro size 2: accumulation 2 on every rank

Every rank runs the same number of micro-batches, some perhaps padding (an empty range), so that none waits for a
collective that another never starts. Under `run.determinism: invariant`, samples are split into micro-batches first:

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
    """The split of the samples of a step into micro-batches.

    Attributes:
        micro_size: Samples per forward at most.
        accumulation: Micro-batches per rank and step.
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
        """True if all micro-batches of a full step have the same size."""
        return self.global_size == self.micro_size * self.accumulation * self.ranks

    @property
    def waste(self) -> float:
        """Fraction of the ranks' time in a full step that is spent on padding or waiting."""
        if self.fixed:
            return 1 - _ceil(self.global_size, self.micro_size) / (self.accumulation * self.ranks)
        return 1 - self.global_size / (_ceil(self.global_size, self.ranks) * self.ranks)

    def ranges(self, samples: int, rank: int) -> list[tuple[int, int]]:
        """Return the [start, stop) of each micro-batch of `rank` in a step; an empty one is padding."""
        if not self.fixed:
            return list(micro_ranges(samples, self.micro_size, rank, self.ranks))
        share = self.share(samples, rank)
        ranges = [_part(0, samples, number, share.terms) for number in range(share.first, share.stop)]
        end = ranges[-1][1] if ranges else samples
        return ranges + [(end, end)] * (_ceil(share.terms, self.ranks) - len(ranges))

    def share(self, samples: int, rank: int) -> Share:
        """Return which of a step's fixed micro-batches belong to `rank`."""
        return share_of(_ceil(samples, self.micro_size), rank, self.ranks)

    def product(self, ranks: int) -> str:
        """Return the sizes as text; a run of more `ranks` than shares has several ranks with the same samples."""
        sign, last = "=" if self.even else "<", "ranks" if ranks == self.ranks else "shares"
        sizes = f"{self.micro_size} x {self.accumulation} x {self.ranks}"
        return f"{self.global_size} {sign} {sizes} (micro-batch x accumulation x {last})"


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's micro-batches [first, stop) of the `terms` of a step."""

    first: int
    stop: int
    terms: int


def share_of(terms: int, rank: int, ranks: int) -> Share:
    """Return the share of `rank` in a step of `terms` micro-batches."""
    return Share(*_part(0, terms, rank, ranks), terms)


def plan_batch(
    global_size: int, micro_size: int | Literal["auto"], ranks: int, *, fixed: bool = False, stages: int = 1
) -> BatchPlan:
    """Return the split of a global batch; an `auto` micro size keeps all pipeline `stages` busy."""
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
    """Yield the [start, stop) of each micro-batch of `rank`; sizes differ by one at most."""
    start, stop = _part(0, samples, rank, ranks)
    accumulation = max(1, _ceil(_ceil(samples, ranks), micro_size))
    return (_part(start, stop, index, accumulation) for index in range(accumulation))


def half(size: int) -> int:
    """Return the micro size that doubles the number of micro-batches."""
    return _ceil(size, 2)


def smallest_micro_batch(samples: int, micro_size: int, ranks: int) -> int:
    """Return the samples of the smallest micro-batch of a step, on any rank."""
    accumulation = max(1, _ceil(_ceil(samples, ranks), micro_size))
    return samples // ranks // accumulation


def nearest_even_sizes(global_size: int, micro_size: int, ranks: int) -> tuple[int, int]:
    """Return the global sizes below (or equal) and above that fill all micro-batches."""
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
