"""The tensors that a rank holds, described so that ranks with equal shardings have equal descriptions.

    model.w         float32 [4096, 512]   over mesh 0, of 64 ranks: dim 0      the same bytes on all ranks of the mesh
    optimizer.step  float32 []            whole
    meshes          0: ranks 64 to 127                                         the rank's own

Each rank's part follows by arithmetic. So ranks exchange hashes, and descriptions only where these differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, cast

from lockstep.checkpoint import hashing
from lockstep.checkpoint.shard_grid import FLAT, Grid, Interval, box_grid, flat_index
from lockstep.core.protocols import Axis
from lockstep.distributed.generators import PREFIX
from lockstep.distributed.shard_boxes import (
    Box,
    FlatShard,
    TensorInfo,
    dtensor_of,
    dtype_name,
    is_sharded,
    local_shards,
    mesh_intervals,
)

WHOLE = -1
_ALL_RANKS = -1

Row = tuple[str, str, tuple[int, ...], int]
"""Name, dtype, shape, and the index of how it is sharded, or `WHOLE`."""


@dataclass(frozen=True, slots=True)
class MeshSharding:
    """The sharding of a tensor over a mesh of ranks.

    Attributes:
        mesh: The index of the mesh among the rank's; `_ALL_RANKS`: all ranks, in a row.
        sizes: The number of ranks along each axis of the mesh.
        dims: The dim that each axis shards; None: it replicates.
        strides: The split factor of each axis that shards a dim in strides, else 1.
        length: Elements of each rank, where the tensor is sharded element by element.
    """

    mesh: int
    sizes: tuple[int, ...]
    dims: tuple[int | None, ...]
    strides: tuple[int, ...]
    length: int | None = None

    def replicas(self) -> Iterator[tuple[int | None, ...]]:
        """Yield the coordinates of each replica; None along axes that shard."""
        return product(
            *(range(size) if dim is None else (None,) for size, dim in zip(self.sizes, self.dims, strict=True))
        )

    def ranks_of(self, replica: Sequence[int | None], ranks: Sequence[int]) -> list[int]:
        """Return the ranks of a replica, in row-major order of the axes that shard."""
        chosen = product(*(range(size) if at is None else (at,) for size, at in zip(self.sizes, replica, strict=True)))
        return [ranks[flat_index(coordinate, self.sizes)] for coordinate in chosen]

    def grid(self, name: str, shape: tuple[int, ...], ranks: Sequence[int]) -> Grid:
        """Return the grid of a tensor, given the ranks of a replica as `ranks_of` returns them."""
        if self.length is not None:
            starts = tuple(range(0, prod(shape), self.length))
            return Grid(((FLAT, starts),), tuple(ranks[: len(starts)]))
        axes = [axis for axis, dim in enumerate(self.dims) if dim is not None]
        along: dict[int, list[int]] = {}
        for axis in axes:
            along.setdefault(cast("int", self.dims[axis]), []).append(axis)
        lengths = {dim: [self.sizes[axis] for axis in of_dim] for dim, of_dim in along.items()}
        intervals = {
            dim: mesh_intervals(shape[dim], lengths[dim], [self.strides[axis] for axis in along[dim]]) for dim in along
        }
        rank_of: dict[Box, int] = {}
        for rank, place in zip(ranks, product(*(range(self.sizes[axis]) for axis in axes)), strict=True):
            at = dict(zip(axes, place, strict=True))
            offsets, sizes = [0] * len(shape), list(shape)
            for dim, of_dim in along.items():
                offsets[dim], sizes[dim] = intervals[dim][flat_index([at[axis] for axis in of_dim], lengths[dim])]
            if 0 not in sizes:
                rank_of[Box(tuple(offsets), tuple(sizes))] = rank
        return box_grid(name, shape, rank_of)


@dataclass(frozen=True, slots=True)
class OwnTensor:
    """A tensor sharded without a mesh: this rank's boxes, or its range of elements."""

    info: TensorInfo
    boxes: tuple[Box, ...]
    elements: Interval | None = None


@dataclass(frozen=True, slots=True)
class InventoryTable:
    """The part of an inventory that many ranks have in common."""

    rows: tuple[Row, ...]
    shardings: tuple[MeshSharding, ...]


@dataclass(slots=True)
class Inventory:
    """The tensors that one rank holds: by mesh, with the ranks of each mesh, and those that follow no mesh."""

    table: InventoryTable
    meshes: tuple[tuple[int, ...], ...]
    own: Mapping[str, OwnTensor] = field(default_factory=dict)


def inventory(tensors: Mapping[str, Any]) -> Inventory:
    """Describe the tensors that this rank holds."""
    rows: list[Row] = []
    shardings: dict[MeshSharding, int] = {}
    meshes: dict[int, tuple[int, tuple[int, ...]]] = {}
    own: dict[str, OwnTensor] = {}
    for name, tensor in tensors.items():
        shape, dtype = tuple(tensor.shape), dtype_name(tensor.dtype)
        if name.startswith(PREFIX):
            own[name] = OwnTensor(TensorInfo(dtype, shape), local_shards(tensor).boxes)
        elif not is_sharded(tensor) or 0 in shape:
            rows.append((name, dtype, shape, WHOLE))
        elif (like := dtensor_of(tensor)) is not None:
            mesh = like.device_mesh
            if id(mesh) not in meshes:
                meshes[id(mesh)] = len(meshes), tuple(mesh.mesh.flatten().tolist())
            dims = tuple(None if placement.is_replicate() else placement.dim for placement in like.placements)
            strides = tuple(getattr(placement, "split_factor", 1) for placement in like.placements)
            sharding = MeshSharding(meshes[id(mesh)][0], tuple(mesh.shape), dims, strides)
            rows.append((name, dtype, shape, shardings.setdefault(sharding, len(shardings))))
        elif isinstance(tensor, FlatShard) and tensor.length is not None:
            sharding = MeshSharding(_ALL_RANKS, (), (), (), tensor.length)
            rows.append((name, dtype, shape, shardings.setdefault(sharding, len(shardings))))
        elif boxes := local_shards(tensor).boxes:
            elements = (tensor.start, tensor.elements) if isinstance(tensor, FlatShard) else None
            own[name] = OwnTensor(TensorInfo(dtype, shape), boxes, elements)
    return Inventory(InventoryTable(tuple(rows), tuple(shardings)), tuple(ranks for _, ranks in meshes.values()), own)


@dataclass(frozen=True, slots=True)
class Inventories:
    """The tensors of all ranks: each table once with its ranks, and the rest of each rank's `Inventory`."""

    tables: Sequence[InventoryTable]
    ranks: Sequence[Sequence[int]]
    meshes: Sequence[tuple[tuple[int, ...], ...]]
    own: Sequence[Mapping[str, OwnTensor]]


def gather_inventories(local: Inventory, axis: Axis) -> Inventories:
    """Return what all ranks hold. All ranks together."""
    mine = hashing.hash_bytes(repr(local.table).encode()), [_as_range(ranks) for ranks in local.meshes], dict(local.own)
    everywhere = cast("list[tuple[str, list[Any], dict[str, OwnTensor]]]", axis.gather(mine))
    ranks_of: dict[str, list[int]] = {}
    for rank, (digest, _, _) in enumerate(everywhere):
        ranks_of.setdefault(digest, []).append(rank)
    tables = [local.table]
    if len(ranks_of) > 1:
        is_first = ranks_of[mine[0]][0] == axis.rank
        gathered = cast("list[InventoryTable]", axis.gather(local.table if is_first else None))
        tables = [gathered[ranks[0]] for ranks in ranks_of.values()]
    meshes = [tuple(tuple(ranks) for ranks in of_rank) for _, of_rank, _ in everywhere]
    return Inventories(tables, list(ranks_of.values()), meshes, [own for _, _, own in everywhere])


def _as_range(ranks: tuple[int, ...]) -> range | tuple[int, ...]:
    """Return a mesh's ranks as a range if possible: a thousand ranks send a thousand meshes."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    steps = range(ranks[0], ranks[-1] + (1 if step > 0 else -1), step) if step else range(0)
    return steps if tuple(steps) == ranks else ranks
