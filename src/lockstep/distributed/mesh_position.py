"""Where this rank stands in the mesh, and with whom it shares what.

    pipeline 2 x data 2        share of the batch     holds
    rank 0 (0, 0)              0                      first half of the model
    rank 1 (0, 1)              1                      the same
    rank 2 (1, 0)              0                      second half
    rank 3 (1, 1)              1                      the same

Ranks along `data` and `shard` have samples of their own; along the other axes they have the same ones, and only one of
them speaks for these in a vote. Along `context` each has its own positions of them, and losses of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch.distributed as dist

from lockstep.distributed.collectives import LocalGroup, RankGroup
from lockstep.distributed.ring import Ring

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from lockstep.core.protocols import Axis
    from lockstep.distributed.process_group import World
    from lockstep.plan.mesh import Axis as AxisName
    from lockstep.plan.mesh import Mesh


@dataclass(frozen=True, slots=True)
class MeshPosition:
    """Attributes:
    coordinates: of this rank on each axis.
    share, shares: which part of each global batch it has, of how many.
    pipeline: the ranks that hold the other stages of this replica.
    data: the ranks that hold the same as this one.
    tensor: the ranks that hold the other parts of each matrix.
    ring: of those that have the other positions of the same samples; None: sequences are whole.
    data_parallel_group: the ranks that hold the same part of the model, sharded or not; None: all ranks.
    device_mesh: of a model that is cut; None: it isn't.
    """

    mesh: Mesh
    coordinates: Mapping[AxisName, int]
    share: int
    shares: int
    pipeline: Axis
    data: Axis
    tensor: Axis
    ring: Ring | None = None
    data_parallel_group: dist.ProcessGroup | None = None
    device_mesh: DeviceMesh | None = None

    @property
    def reports_counts(self) -> bool:
        """Whether this rank speaks for its share's samples."""
        return self.reports_metrics and self.coordinates["context"] == 0

    @property
    def reports_metrics(self) -> bool:
        """Whether its sums of an evaluation count."""
        return self.coordinates["pipeline"] == 0 and self.coordinates["tensor"] == 0

    @property
    def reports_loss(self) -> bool:
        """Whether its sum of losses counts."""
        return self.coordinates["tensor"] == 0

    @property
    def pipeline_group(self) -> dist.ProcessGroup:
        assert self.device_mesh is not None, "a model that isn't cut has no pipeline"
        return self.device_mesh.get_group("pipeline")


def mesh_position(mesh: Mesh, world: World) -> MeshPosition:
    """All ranks together: groups are made."""
    coordinates = mesh.coordinates(world.rank)
    share = coordinates["data"] * mesh.shard + coordinates["shard"]
    if mesh.pieces == 1:
        ring = _ring(mesh) if mesh.context > 1 else None
        return MeshPosition(mesh, coordinates, share, mesh.shares, LocalGroup(), world.axis, LocalGroup(), ring)
    from torch.distributed.device_mesh import init_device_mesh  # takes 0.5 s to import

    axes = ("pipeline", "data", "shard", "tensor")
    sizes = tuple(getattr(mesh, axis) for axis in axes)
    made = init_device_mesh(world.device.type, sizes, mesh_dim_names=axes)
    return MeshPosition(
        mesh,
        coordinates,
        share=share,
        shares=mesh.shares,
        pipeline=_axis(made, "pipeline"),
        data=_axis(made, "data"),
        tensor=_axis(made, "tensor"),
        data_parallel_group=made["data", "shard"]._flatten().get_group(),
        device_mesh=made,
    )


def stage_pair(place: MeshPosition, first: int, last: int) -> Axis:
    """This rank and, if it has the first or the last stage, the one with the other. All ranks together.

    Args:
        first, last: their coordinates on the pipeline.
    """
    mesh, mine = place.mesh, None
    for ranks in mesh.groups("pipeline"):
        members = [ranks[first], ranks[last]]
        group = dist.new_group(members)
        if dist.get_rank() in members:
            mine = group
    return RankGroup(mine) if mine is not None else LocalGroup()


def _ring(mesh: Mesh) -> Ring:
    """Of this rank. All ranks together: every group is made by all."""
    mine = None
    for ranks in mesh.groups("context"):
        group = dist.new_group(list(ranks))
        if dist.get_rank() in ranks:
            mine = group
    assert mine is not None, "each rank is in one"
    return Ring(mine)


def _axis(mesh: DeviceMesh, name: str) -> Axis:
    group = mesh.get_group(name)
    return RankGroup(group) if group.size() > 1 else LocalGroup()
