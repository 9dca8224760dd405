"""The grid of a saved tensor: where it is cut, and which rank's file has each cell.

    cuts {0: [0, 4], 1: [0, 8]}        +---------+---------+      cells in row-major order: ranks [0, 1, 2, 3]
                                       | rank 0  | rank 1  |
    of a tensor [8, 16]                +---------+---------+
                                       | rank 2  | rank 3  |
                                       +---------+---------+

A grid always covers the whole tensor, without gaps or overlaps. Tensors of one shape and sharding share one. A tensor
that is sharded element by element is cut along `FLAT`, the dim of its elements in row-major order.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod

from lockstep.core.errors import RunFailed
from lockstep.distributed.shard_boxes import Box, flat_boxes

FLAT = -1

Starts = tuple[int, ...]
Interval = tuple[int, int]
"""Start and size."""


@dataclass(frozen=True)
class Grid:
    """The cells of a tensor.

    Attributes:
        cuts: Where the cells begin, by dim, ascending from 0; the tensor is whole along other dims.
        ranks: The rank that wrote each cell, in row-major order of the cuts.
    """

    cuts: tuple[tuple[int, Starts], ...]
    ranks: tuple[int, ...]

    @cached_property
    def _cells(self) -> Mapping[int, int]:
        return {rank: cell for cell, rank in enumerate(self.ranks)}

    def boxes_of(self, rank: int, shape: tuple[int, ...]) -> tuple[Box, ...]:
        """Return what a rank has written of a tensor of this shape; several boxes only along `FLAT`."""
        cell = self._cells.get(rank)
        return self._boxes(cell, shape) if cell is not None else ()

    def meeting(self, box: Box, shape: tuple[int, ...]) -> Iterator[tuple[int, Box]]:
        """Yield the boxes that have elements of `box`, each with its rank."""
        if not box.elements:
            return
        if self.cuts and self.cuts[0][0] == FLAT:
            starts = self.cuts[0][1]
            last = tuple(offset + size - 1 for offset, size in zip(box.offsets, box.sizes, strict=True))
            first = bisect_right(starts, flat_index(box.offsets, shape)) - 1
            for cell in range(first, bisect_right(starts, flat_index(last, shape))):
                parts = self._boxes(cell, shape)
                yield from ((self.ranks[cell], part) for part in parts if part.meets(box) is not None)
            return
        ranges = []
        for dim, starts in self.cuts:
            first = bisect_right(starts, box.offsets[dim]) - 1
            ranges.append(range(first, bisect_left(starts, box.offsets[dim] + box.sizes[dim])))
        lengths = [len(starts) for _, starts in self.cuts]
        for indices in product(*ranges):
            cell = flat_index(indices, lengths)
            yield self.ranks[cell], self._boxes(cell, shape)[0]

    def _boxes(self, cell: int, shape: tuple[int, ...]) -> tuple[Box, ...]:
        if self.cuts and self.cuts[0][0] == FLAT:
            starts = self.cuts[0][1]
            stop = starts[cell + 1] if cell + 1 < len(starts) else prod(shape)
            return tuple(flat_boxes(shape, starts[cell], stop))
        offsets, sizes = [0] * len(shape), list(shape)
        for dim, starts in reversed(self.cuts):
            cell, index = divmod(cell, len(starts))
            stop = starts[index + 1] if index + 1 < len(starts) else shape[dim]
            offsets[dim], sizes[dim] = starts[index], stop - starts[index]
        return (Box(tuple(offsets), tuple(sizes)),)

    def fits(self, shape: tuple[int, ...], ranks: int) -> bool:
        """Return whether it can be the grid of a tensor of this shape that this number of ranks wrote."""
        dims = [dim for dim, _ in self.cuts]
        if dims != sorted(set(dims)) or (FLAT in dims and len(dims) > 1) or any(dim >= len(shape) for dim in dims):
            return False
        for dim, starts in self.cuts:
            length = prod(shape) if dim == FLAT else shape[dim]
            if starts[:1] != (0,) or starts[-1] >= length or any(map(int.__ge__, starts, starts[1:])):
                return False
        num_cells = prod(len(starts) for _, starts in self.cuts)
        return len(self.ranks) == len(set(self.ranks)) == num_cells and all(0 <= rank < ranks for rank in self.ranks)


def flat_index(index: Sequence[int], shape: Sequence[int]) -> int:
    """Return the place of an index in row-major order."""
    flat = 0
    for position, length in zip(index, shape, strict=True):
        flat = flat * length + position
    return flat


def box_grid(name: str, shape: tuple[int, ...], rank_of: Mapping[Box, int]) -> Grid:
    """Return the grid of boxes that one rank each writes. Raises RunFailed if they don't make up the tensor."""
    boxes = list(rank_of)
    dims = [dim for dim in range(len(shape)) if len({(box.offsets[dim], box.sizes[dim]) for box in boxes}) > 1]
    cells = sorted(boxes, key=lambda box: [box.offsets[dim] for dim in dims])
    cuts = tuple((dim, tuple(sorted({box.offsets[dim] for box in boxes}))) for dim in dims)
    grid = Grid(cuts, tuple(rank_of[box] for box in cells))
    return _whole(name, shape, grid, lambda: all(grid._boxes(cell, shape) == (box,) for cell, box in enumerate(cells)))


def flat_grid(name: str, shape: tuple[int, ...], rank_of: Mapping[Interval, int]) -> Grid:
    """Return the grid of ranges of elements that one rank each writes. Raises RunFailed if elements are missing."""
    intervals = sorted(rank_of)
    starts = tuple(start for start, _ in intervals)
    ends = [start + size for start, size in intervals]
    grid = Grid(((FLAT, starts),), tuple(rank_of[interval] for interval in intervals))
    return _whole(name, shape, grid, lambda: ends == [*starts[1:], prod(shape)])


def _whole(name: str, shape: tuple[int, ...], grid: Grid, is_filled: Callable[[], bool]) -> Grid:
    if not grid.fits(shape, max(grid.ranks, default=0) + 1) or not is_filled():
        raise RunFailed(f"{name}: its parts don't make up the whole of {list(shape)}, with one part a rank at most")
    return grid
