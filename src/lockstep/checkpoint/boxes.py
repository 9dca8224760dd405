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
from math import prod
from typing import TYPE_CHECKING, Any, cast

from lockstep.core.errors import GiveUp

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor.

    Attributes:
        offsets, sizes: along each dim; both empty for a 0-dim tensor, whose one element the box is.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.sizes)

    def meets(self, other: Box) -> Box | None:
        """What both hold, or None."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        ends = [
            min(a + n, b + m) for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        ]
        sizes = tuple(end - offset for end, offset in zip(ends, offsets, strict=True))
        return Box(offsets, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Where it lies in `outer`, as an index."""
        starts = [a - b for a, b in zip(self.offsets, outer.offsets, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class Kind:
    """What a tensor is, whoever holds it.

    Attributes:
        dtype: torch's name for it, such as `bfloat16`.
    """

    dtype: str
    shape: tuple[int, ...]

    @property
    def whole(self) -> Box:
        return Box((0,) * len(self.shape), self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class Held:
    """What one rank holds of a tensor."""

    kind: Kind
    boxes: tuple[Box, ...]


def held(tensor: Tensor) -> Held:
    """What this rank holds of it: all, or the shards of a DTensor."""
    kind = Kind(dtype_name(tensor.dtype), tuple(tensor.shape))
    if not is_sharded(tensor) or not kind.whole.elements:
        return Held(kind, (kind.whole,))
    chunks = cast("Any", tensor).__create_chunk_list__()
    return Held(kind, tuple(Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks if prod(chunk.sizes)))


def part(tensor: Tensor, box: Box) -> Tensor:
    """The live memory of one of the boxes that `held` named."""
    if not is_sharded(tensor):
        return tensor.detach()
    local: Tensor = cast("Any", tensor).to_local()
    return local.detach().view(box.sizes)


def is_sharded(tensor: Tensor) -> bool:
    """Whether it is a DTensor: asked without importing what defines it."""
    return hasattr(tensor, "__create_chunk_list__")


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a named tensor: what one rank writes at once."""

    name: str
    kind: Kind
    box: Box


def share_out(holdings: Sequence[Mapping[str, Held]], bytes_of: Mapping[str, int]) -> list[list[Piece]]:
    """What each rank writes, given what each holds: everything once, and ranks evenly loaded.

    Args:
        bytes_of: an element of each dtype.

    Raises:
        GiveUp: ranks hold different tensors under one name, or parts that don't make up the whole.
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
    """Raises GiveUp unless the pieces of a tensor make it up, once."""
    kinds = {piece.kind for piece in pieces}
    if len(kinds) > 1:
        raise GiveUp(f"{name} is not the same tensor on all ranks: {' and '.join(sorted(map(str, kinds)))}")
    assert pieces, "a tensor that is saved has at least one piece"
    kind = pieces[0].kind
    inside = all(
        offset + size <= length
        for piece in pieces
        for offset, size, length in zip(piece.box.offsets, piece.box.sizes, kind.shape, strict=True)
    )
    if not inside or sum(piece.box.elements for piece in pieces) != kind.whole.elements or _overlap(pieces):
        raise GiveUp(f"{name}: its parts don't make up the whole of {kind}")


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
