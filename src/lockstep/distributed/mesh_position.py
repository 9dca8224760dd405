"""The position of a rank in the mesh, and its groups.

    pipeline 2 x data 2        share of the batch     holds
    rank 0 (0, 0)              0                      first half of the model
    rank 1 (0, 1)              1                      the same
    rank 2 (1, 0)              0                      second half
    rank 3 (1, 1)              1                      the same

Ranks along `data` and `shard` have different samples. Along the other axes they have the same samples, which only one
of them counts in a vote.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from lockstep.distributed.collectives import LocalGroup, RankGroup, Ring, own_group

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    from lockstep.core.protocols import Axis
    from lockstep.distributed.process_group import World
    from lockstep.plan.mesh import Axis as AxisName
    from lockstep.plan.mesh import Mesh


@dataclass(frozen=True, slots=True)
class TensorParallelGroup:
    """The ranks that have the same samples, and each a shard of every matrix.

    Attributes:
        replicated: Names of the parameters that each rank holds whole.
        partial: Replicated parameters that need their gradients summed over the ranks.
    """

    axis: Axis
    replicated: frozenset[str]
    partial: frozenset[str]


@dataclass(frozen=True, slots=True)
class MeshPosition:
    """The position of this rank in the mesh.

    Attributes:
        coordinates: On each axis.
        share, shares: The number of its part of each global batch, and the number of parts.
        pipeline: The ranks with the other stages of this replica.
        data: The ranks with the same parameters.
        tensor: The ranks with the other shards of each matrix.
        ring: The ranks with the other positions of the same samples; None: sequences are whole.
        data_parallel_group: The ranks with the same part of the model, sharded or not; None: all ranks.
        device_mesh: None for a model that is neither partitioned nor tensor-parallel.
        reports_counts, reports_metrics, reports_loss: Whether its samples, metrics or losses count.
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

    reports_counts: bool = field(init=False)
    reports_metrics: bool = field(init=False)
    reports_loss: bool = field(init=False)

    def __post_init__(self) -> None:
        metrics = self.coordinates["pipeline"] == 0 and self.coordinates["tensor"] == 0
        object.__setattr__(self, "reports_metrics", metrics)
        object.__setattr__(self, "reports_loss", self.coordinates["tensor"] == 0)
        object.__setattr__(self, "reports_counts", metrics and self.coordinates["context"] == 0)


def mesh_position(mesh: Mesh, world: World) -> MeshPosition:
    """Return this rank's position, and make the groups. All ranks together."""
    coordinates = mesh.coordinates(world.rank)
    share = coordinates["data"] * mesh.shard + coordinates["shard"]
    if mesh.pieces == 1:
        group = own_group(mesh.groups("context")) if mesh.context > 1 else None
        ring = Ring(group) if group is not None else None
        return MeshPosition(mesh, coordinates, share, mesh.shares, LocalGroup(), world.axis, LocalGroup(), ring)
    from torch.distributed.device_mesh import init_device_mesh  # takes 0.5 s to import

    names = ("pipeline", "data", "shard", "tensor")
    sizes = tuple(getattr(mesh, name) for name in names)
    device_mesh = init_device_mesh(world.device.type, sizes, mesh_dim_names=names)

    def axis_of(name: str) -> Axis:
        group = device_mesh.get_group(name)
        return RankGroup(group) if group.size() > 1 else LocalGroup()

    group = device_mesh["data", "shard"]._flatten().get_group()
    pipeline, data, tensor = map(axis_of, ("pipeline", "data", "tensor"))
    return MeshPosition(mesh, coordinates, share, mesh.shares, pipeline, data, tensor, None, group, device_mesh)


def stage_pair(position: MeshPosition, first: int, last: int) -> Axis:
    """Return the axis of the pipeline's ranks `first` and `last`; on other ranks a local one. All ranks together."""
    group = own_group((ranks[first], ranks[last]) for ranks in position.mesh.groups("pipeline"))
    return RankGroup(group) if group is not None else LocalGroup()
