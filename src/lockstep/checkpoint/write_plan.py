"""The assignment of tensors' parts to ranks that write them, as boxes in a tensor's index space.

    saved by two ranks            read by one of three ranks
    +-----------+                 +-----------+
    |  box 0    |                 |           |
    +-----------+   intersect     |-----------|  ==> rows 4..6 come from box 0, rows 6..8 from box 1
    |  box 1    |                 |  the box  |
    +-----------+                 +-----------+

A tensor that is replicated is written once, by the rank that has least to write. torch's own planners follow the same
rules; importing them takes 0.7 s, which a run without sharded tensors does not spend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.core.errors import RunFailed
from lockstep.distributed.shard_boxes import Box, LocalShards, TensorInfo


@dataclass(frozen=True, slots=True)
class WriteItem:
    """A box of a tensor that one rank writes contiguously."""

    name: str
    info: TensorInfo
    box: Box


def plan_writes(shards: Sequence[Mapping[str, LocalShards]], element_bytes: Mapping[str, int]) -> list[list[WriteItem]]:
    """Return what each rank writes, so that every box is written once and the ranks are evenly loaded.

    Args:
        shards: Each rank's local shards, by tensor name.
        element_bytes: Bytes of an element, by dtype.

    Raises:
        RunFailed: Ranks hold different tensors under one name, or shards that don't make up the tensor.
    """
    ranks_of: dict[WriteItem, list[int]] = {}
    for rank, local in enumerate(shards):
        for name, shard in local.items():
            for box in shard.boxes:
                ranks_of.setdefault(WriteItem(name, shard.kind, box), []).append(rank)
    by_name: dict[str, list[WriteItem]] = {}
    for item in ranks_of:
        by_name.setdefault(item.name, []).append(item)
    for name, items in by_name.items():
        check_cover(name, items)
    plan: list[list[WriteItem]] = [[] for _ in shards]
    loads = [0] * len(shards)
    for item, ranks in ranks_of.items():
        rank = min(ranks, key=lambda rank: loads[rank])
        plan[rank].append(item)
        loads[rank] += item.box.elements * element_bytes[item.info.dtype]
    return plan


def check_cover(name: str, items: Sequence[WriteItem]) -> None:
    """Raise RunFailed unless the boxes of a tensor cover it without overlap."""
    infos = {item.info for item in items}
    if len(infos) > 1:
        raise RunFailed(f"{name} is not the same tensor on all ranks: {' and '.join(sorted(map(str, infos)))}")
    assert items, "a tensor that is saved has at least one box"
    info = items[0].info
    inside = all(
        offset + size <= length
        for item in items
        for offset, size, length in zip(item.box.offsets, item.box.sizes, info.shape, strict=True)
    )
    if not inside or sum(item.box.elements for item in items) != info.whole.elements or _overlap(items):
        raise RunFailed(f"{name}: its parts don't make up the whole of {info}")


def _overlap(items: Sequence[WriteItem]) -> bool:
    """Return whether two boxes overlap, by a sweep along the dim that is split most: near linear in the boxes."""
    boxes = [item.box for item in items if item.box.elements]
    if len(boxes) < 2 or not boxes[0].sizes:
        return len(boxes) > 1
    dim = max(range(len(boxes[0].sizes)), key=lambda dim: len({box.offsets[dim] for box in boxes}))
    boxes.sort(key=lambda box: box.offsets[dim])
    for index, box in enumerate(boxes):
        end = box.offsets[dim] + box.sizes[dim]
        for other in boxes[index + 1 :]:
            if other.offsets[dim] >= end:
                break
            if box.meets(other) is not None:
                return True
    return False
