"""Boxes of sharded tensors: what a rank holds of a range of elements, and of a tensor that two mesh axes shard."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.worlds import in_world

from lockstep.distributed.shard_boxes import (
    Box,
    FlatShard,
    box_view,
    copy_from_full,
    full_tensor,
    local_shards,
    shard_view,
)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[tuple[int, ...], int, int]:
    """Draw a shape, and a range of its elements."""
    shape = tuple(draw(st.lists(st.integers(1, 5), max_size=4)))
    start = draw(st.integers(0, prod(shape)))
    return shape, start, draw(st.integers(start, prod(shape)))


@given(ranges())
def test_the_boxes_of_a_range_hold_its_elements_in_order(drawn: tuple[tuple[int, ...], int, int]) -> None:
    shape, start, stop = drawn
    whole = torch.arange(prod(shape)).reshape(shape)
    shard = FlatShard(torch.zeros(stop - start, dtype=torch.int64), start, shape)
    boxes = local_shards(shard).boxes
    assert sum(box.elements for box in boxes) == stop - start
    assert len(boxes) <= max(1, 2 * len(shape) - 1)
    for box in boxes:
        index = tuple(slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True))
        shard_view(shard, box).copy_(whole[index])
    assert shard.memory.tolist() == list(range(start, stop)) == shard.of(whole).tolist()
    loaded = torch.zeros_like(shard.memory)
    for box in boxes:
        box_view(loaded, boxes, box).copy_(shard_view(shard, box))
    assert loaded.equal(shard.memory)


@pytest.mark.parametrize(
    ("first", "second", "common"),
    [
        (Box((0, 0), (4, 4)), Box((2, 1), (4, 2)), Box((2, 1), (2, 2))),
        (Box((0, 0), (2, 4)), Box((2, 0), (2, 4)), None),
        (Box((), ()), Box((), ()), Box((), ())),
    ],
)
def test_two_boxes_meet_where_they_overlap(first: Box, second: Box, common: Box | None) -> None:
    assert first.meets(second) == second.meets(first) == common


def test_a_box_within_another_is_indexed_from_the_other_s_corner() -> None:
    assert Box((3, 2), (2, 1)).within(Box((2, 2), (4, 4))) == (slice(1, 3), slice(0, 1))


SHAPES = ((8, 6), (5, 4), (7, 3), (13, 2), (1, 4), (6,), (9, 5))


def _differences(shard: int, tensor: int) -> list[str]:
    """Return descriptions of what this rank holds or gathers wrongly."""
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (shard, tensor), mesh_dim_names=("shard", "tensor"))
    differences = []
    for shape, placement in product(SHAPES, (Shard(0), Shard(1), Replicate())):
        if placement.is_shard() and placement.dim >= len(shape):
            continue
        whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
        module = nn.Module()
        module.weight = nn.Parameter(distribute_tensor(whole, mesh["tensor"], [placement], src_data_rank=None))
        fully_shard(module, mesh=mesh["shard"])
        case = f"{shape} {placement} on {shard} x {tensor}"
        if not torch.equal(full_tensor(module.weight.detach()), whole):
            differences.append(f"{case}: gathered otherwise")
        boxes = local_shards(module.weight).boxes
        for box in boxes:
            if not torch.equal(shard_view(module.weight, box), whole[box.within(local_shards(whole).kind.whole)]):
                differences.append(f"{case}: {box} holds something else")
        copy_from_full(module.weight, -whole)
        if not torch.equal(full_tensor(module.weight.detach()), -whole):
            differences.append(f"{case}: something else was copied in")
        everywhere: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(everywhere, sum(box.elements for box in boxes))
        copies = 1 if placement.is_shard() else tensor
        if sum(everywhere) != copies * whole.numel():
            differences.append(f"{case}: {sum(everywhere)} elements are held")
    dist.destroy_process_group()
    return differences


@pytest.mark.parametrize(("shard", "tensor"), [(2, 2), (3, 1), (1, 4), (2, 3)])
def test_a_tensor_that_two_axes_shard_is_held_and_gathered_exactly(shard: int, tensor: int) -> None:
    assert in_world(shard * tensor, _differences, shard, tensor) == [[]] * (shard * tensor)
