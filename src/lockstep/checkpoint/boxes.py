"""Which rank writes which part of which tensor, and which saved parts a rank reads: boxes in a tensor's index space.

    saved by two ranks            wanted by a third of three ranks
    +-----------+                 +-----------+
    |  box 0    |                 |           |
    +-----------+   intersect     |-----------|  ==> rows 4..6 come from box 0, rows 6..8 from box 1
    |  box 1    |                 |  wanted   |
    +-----------+                 +-----------+

A tensor that all ranks hold is written once, by the rank that has least to write. The rules are those of torch's
distributed checkpoint planners; their import alone takes 0.7 s, and a run without sharded tensors needs none of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.core.errors import RunFailed
from lockstep.distributed.shard_boxes import Box, LocalShards, TensorInfo


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a named tensor: what one rank writes at once."""

    name: str
    kind: TensorInfo
    box: Box


def share_out(holdings: Sequence[Mapping[str, LocalShards]], bytes_of: Mapping[str, int]) -> list[list[Piece]]:
    """What each rank writes, given what each holds: everything once, and ranks evenly loaded.

    Args:
        bytes_of: an element of each dtype.

    Raises:
        RunFailed: ranks hold different tensors under one name, or parts that don't make up the whole.
    """
    holders: dict[Piece, list[int]] = {}
    for rank, holding in enumerate(holdings):
        for name, one in holding.items():
            for box in one.boxes:
                holders.setdefault(Piece(name, one.kind, box), []).append(rank)
    by_name: dict[str, list[Piece]] = {}
    for piece in holders:
        by_name.setdefault(piece.name, []).append(piece)
    for name, pieces in by_name.items():
        check_cover(name, pieces)
    shares: list[list[Piece]] = [[] for _ in holdings]
    loads = [0] * len(holdings)
    for piece, ranks in holders.items():
        rank = min(ranks, key=lambda rank: loads[rank])
        shares[rank].append(piece)
        loads[rank] += piece.box.elements * bytes_of[piece.kind.dtype]
    return shares


def check_cover(name: str, pieces: Sequence[Piece]) -> None:
    """Raises RunFailed unless the pieces of a tensor make it up, once."""
    kinds = {piece.kind for piece in pieces}
    if len(kinds) > 1:
        raise RunFailed(f"{name} is not the same tensor on all ranks: {' and '.join(sorted(map(str, kinds)))}")
    assert pieces, "a tensor that is saved has at least one piece"
    kind = pieces[0].kind
    inside = all(
        offset + size <= length
        for piece in pieces
        for offset, size, length in zip(piece.box.offsets, piece.box.sizes, kind.shape, strict=True)
    )
    if not inside or sum(piece.box.elements for piece in pieces) != kind.whole.elements or _overlap(pieces):
        raise RunFailed(f"{name}: its parts don't make up the whole of {kind}")


def _overlap(parts: Sequence[Piece]) -> bool:
    """Swept along the dim that is cut most, so that a thousand shards are compared with their neighbours alone."""
    boxes = [piece.box for piece in parts if piece.box.elements]
    if len(boxes) < 2 or not boxes[0].sizes:
        return len(boxes) > 1
    dim = max(range(len(boxes[0].sizes)), key=lambda dim: len({box.offsets[dim] for box in boxes}))
    boxes.sort(key=lambda box: box.offsets[dim])
    for index, one in enumerate(boxes):
        end = one.offsets[dim] + one.sizes[dim]
        for other in boxes[index + 1 :]:
            if other.offsets[dim] >= end:
                break
            if one.meets(other) is not None:
                return True
    return False
