"""Matrices with rows sharded over ranks: each is gathered on one rank, computed there, and its rows sent back.

So the ranks share the arithmetic (Liu et al. 2025, arXiv:2502.16982, section 2.3), and a rank holds the whole matrices
of one round, and of the next one, which are gathered meanwhile. Matrices of equal cost share a round, and small ones
fill it up to `CHUNK_BYTES`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import TYPE_CHECKING

import torch

from lockstep.optim.chunks import CHUNK_BYTES

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.distributed.shard_boxes import RowShards

Round = list[list[int]]
"""The matrices of each rank, by index."""


def replace_by_whole(
    function: Callable[[Tensor], Tensor],
    parts: Sequence[Tensor],
    names: Sequence[str],
    shards: RowShards,
    dtype: torch.dtype,
) -> None:
    """Replace this rank's rows of each named matrix by the rows of `function`(the whole matrix). All ranks together.

    Args:
        function: Takes a matrix in `dtype`, as it is sent, and may overwrite it; returns one of its shape and
        dtype.
    """
    exchanges = [
        _Exchange(members, parts, names, shards, dtype)
        for members in rounds([shards.shapes[name] for name in names], shards.axis.size, dtype.itemsize)
    ]
    gathered = exchanges[0].gather() if exchanges else None
    sent_back: Callable[[], None] | None = None
    for number, exchange in enumerate(exchanges):
        assert gathered is not None
        wholes = gathered()
        gathered = exchanges[number + 1].gather() if number + 1 < len(exchanges) else None
        results = []
        while wholes:
            results.append(function(wholes.pop(0)))  # each is freed once it has been used
        if sent_back is not None:
            sent_back()
        sent_back = exchange.send_back(results)
    if sent_back is not None:
        sent_back()


def rounds(shapes: Sequence[tuple[int, ...]], ranks: int, element_bytes: int) -> list[Round]:
    """Return which rank computes which matrices, in rounds; the most costly first, the same on all ranks."""
    costs = [prod(shape) * min(shape) for shape in shapes]  # of products with the transposed matrix
    order = sorted(range(len(shapes)), key=lambda index: (-costs[index], index))
    made: list[Round] = []
    size = 0
    for turn, first in enumerate(range(0, len(order), ranks)):
        dealt = order[first : first + ranks]
        added = max(prod(shapes[index]) for index in dealt) * element_bytes
        if not made or size + added > CHUNK_BYTES:
            made.append([[] for _ in range(ranks)])
            size = 0
        size += added
        takers = range(ranks) if turn % 2 == 0 else reversed(range(ranks))  # after a costly matrix comes a cheap one
        for rank, index in zip(takers, dealt, strict=False):
            made[-1][rank].append(index)
    return made


class _Exchange:
    """The exchange of the matrices of a round.

    sent        [this rank's rows of A, C | of B, D]        first those that rank 0 computes
    received    [rows of A, C of rank 0 | of rank 1]        of the matrices that this rank computes
    """

    def __init__(
        self, members: Round, parts: Sequence[Tensor], names: Sequence[str], shards: RowShards, dtype: torch.dtype
    ) -> None:
        self._axis, self._dtype = shards.axis, dtype
        self._parts = [parts[index] for of_rank in members for index in of_rank]
        self._given = [sum(parts[index].numel() for index in of_rank) for of_rank in members]
        own = [names[index] for index in members[shards.axis.rank]]
        self._shapes = [shards.shapes[name] for name in own]
        rows = [shards.rows(name) for name in own]
        widths = [prod(shape[1:]) for shape in self._shapes]
        self._sizes = [
            [rows[matrix][rank] * widths[matrix] for matrix in range(len(own))] for rank in range(self._axis.size)
        ]
        self._taken = [sum(sizes) for sizes in self._sizes]

    def gather(self) -> Callable[[], list[Tensor]]:
        """Start gathering; return a function that waits for the whole matrices of this rank."""
        sent = torch.empty(sum(self._given), dtype=self._dtype, device=self._parts[0].device)
        torch._foreach_copy_(self._views(sent), self._parts)
        finish = self._axis.start_all_to_all(sent, self._given, self._taken)

        def wholes() -> list[Tensor]:
            received = finish()
            if len(self._shapes) == 1:
                return [received.view(self._shapes[0])]
            pieces = torch.split(received, [size for sizes in self._sizes for size in sizes])
            return [
                torch.cat(pieces[matrix :: len(self._shapes)]).view(shape) for matrix, shape in enumerate(self._shapes)
            ]

        return wholes

    def send_back(self, results: Sequence[Tensor]) -> Callable[[], None]:
        """Start sending back the results; return a function that waits and writes this rank's rows."""
        by_rank = [
            torch.split(result.reshape(-1), [of_rank[matrix] for of_rank in self._sizes])
            for matrix, result in enumerate(results)
        ]
        pieces = [of_matrix[rank] for rank in range(self._axis.size) for of_matrix in by_rank]
        sent = torch.cat(pieces) if pieces else torch.empty(0, dtype=self._dtype, device=self._parts[0].device)
        finish = self._axis.start_all_to_all(sent, self._taken, self._given)
        return lambda: torch._foreach_copy_(self._parts, self._views(finish()))

    def _views(self, flat: Tensor) -> list[Tensor]:
        sizes = [part.numel() for part in self._parts]
        return [piece.view(part.shape) for piece, part in zip(torch.split(flat, sizes), self._parts, strict=True)]
