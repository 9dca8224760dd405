"""Tensors that a tensor axis divides first, and FSDP then: what each rank holds of them, and what they are together."""

from __future__ import annotations

from itertools import product

import torch
from kit.worlds import in_world

SHAPES = ((8, 6), (5, 4), (7, 3), (13, 2), (1, 4), (6,), (9, 5))


def _held_and_gathered(shard: int, tensor: int) -> list[str]:
    """What is wrong, on this rank."""
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from lockstep.distributed.shard_boxes import copy_from_full, full_tensor, local_shards, shard_view

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (shard, tensor), mesh_dim_names=("shard", "tensor"))
    wrong = []
    for shape, placement in product(SHAPES, (Shard(0), Shard(1), Replicate())):
        if placement.is_shard() and placement.dim >= len(shape):
            continue
        whole = torch.arange(float(torch.Size(shape).numel())).view(shape)
        module = nn.Module()
        module.weight = nn.Parameter(distribute_tensor(whole, mesh["tensor"], [placement], src_data_rank=None))
        fully_shard(module, mesh=mesh["shard"])
        said = f"{shape} {placement} on {shard} x {tensor}"
        if not torch.equal(full_tensor(module.weight.detach()), whole):
            wrong.append(f"{said}: put together otherwise")
        boxes = local_shards(module.weight).boxes
        for box in boxes:
            if not torch.equal(shard_view(module.weight, box), whole[box.within(local_shards(whole).kind.whole)]):
                wrong.append(f"{said}: {box} holds something else")
        copy_from_full(module.weight, -whole)
        if not torch.equal(full_tensor(module.weight.detach()), -whole):
            wrong.append(f"{said}: something else was put in")
        everywhere: list[int] = [0] * dist.get_world_size()
        dist.all_gather_object(everywhere, sum(box.elements for box in boxes))
        copies = 1 if placement.is_shard() else tensor
        if sum(everywhere) != copies * whole.numel():
            wrong.append(f"{said}: {sum(everywhere)} elements are held")
    dist.destroy_process_group()
    return wrong


def test_a_part_of_a_part_is_where_it_says() -> None:
    for shard, tensor in ((2, 2), (3, 1), (1, 4), (2, 3)):
        for wrong in in_world(shard * tensor, _held_and_gathered, shard, tensor):
            assert wrong == []
