"""A stretch of a tensor's elements is so many boxes, whose elements lie in its memory one after the other."""

from __future__ import annotations

from math import prod

import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.distributed.shard_boxes import FlatShard, box_view, local_shards, shard_view


@st.composite
def stretches(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    start = draw(st.integers(0, prod(shape)))
    return shape, start, draw(st.integers(start, prod(shape)))


@given(stretches())
def test_the_boxes_of_a_stretch_are_its_elements(one: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = one
    whole = torch.arange(prod(shape)).reshape(shape)
    shard = FlatShard(torch.zeros(stop - start, dtype=torch.int64), start, shape)
    boxes = local_shards(shard).boxes
    assert sum(box.elements for box in boxes) == stop - start
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    for box in boxes:
        place = tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
        shard_view(shard, box).copy_(whole[place])
    assert shard.memory.tolist() == list(range(start, stop)) == shard.of(whole).tolist()
    loaded = torch.zeros_like(shard.memory)
    for box in boxes:
        box_view(loaded, boxes, box).copy_(shard_view(shard, box))
    assert loaded.equal(shard.memory)
