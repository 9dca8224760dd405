"""The assignment of tensors' shards to the ranks that write them, and that read them for others.

    held by ranks 0-3, whole     a a a b b b b c      rank 0 writes a, rank 1 b, ...: shares of equal size, in order,
                                 |0  |1    |2 |       so that a reader opens few files; a small state is one share
    sharded over a mesh          w                    each rank its own shard, in the replica that has w in its share

All ranks compute it from the inventories, in a few operations per tensor for any number of ranks. Rank 0 also computes
the grids for the manifest, once per plan, in the background.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from lockstep.checkpoint.file_layout import FileLayout, WriteItem, file_layout
from lockstep.checkpoint.inventory import WHOLE, Inventories, Inventory, MeshSharding, gather_inventories, inventory
from lockstep.checkpoint.manifest import ELEMENT_BYTES
from lockstep.checkpoint.shard_grid import Grid, box_grid, flat_grid
from lockstep.checkpoint.snapshot import Snapshot
from lockstep.core.errors import RunFailed
from lockstep.core.process_settings import paused_collection
from lockstep.core.protocols import Axis
from lockstep.core.records import TrainingState
from lockstep.distributed.shard_boxes import ShardLike, TensorInfo, local_shards

MIN_SHARE_BYTES = 2**24


@dataclass(slots=True)
class Holders:
    """Tensors that the same ranks hold in the same shards, in one or more replicas.

    Attributes:
        sharding: How they are sharded; None: each replica is one rank, which holds them whole.
        replicas: The ranks of each replica, in the order of the grid's cells.
    """

    sharding: MeshSharding | None
    replicas: Sequence[Sequence[int]]
    names: list[str]
    sizes: list[int]

    @property
    def shares(self) -> list[int]:
        """The replica that writes each tensor."""
        share = max(MIN_SHARE_BYTES, -(-sum(self.sizes) // len(self.replicas)))
        shares, before = [], 0
        for size in self.sizes:
            shares.append(min(before // share, len(self.replicas) - 1))
            before += size
        return shares


class WritePlan:
    """The parts that every rank writes. Grids of replicated and mesh-sharded tensors are computed on demand.

    Raises RunFailed if ranks hold different tensors under one name, or shards that don't make up the tensor.
    """

    def __init__(self, held: Inventories) -> None:
        self.infos, self.groups = _groups(held)
        self._own = _own_grids(held, self.infos)
        self._grids: dict[Any, Grid] = {}
        self._numbered: tuple[dict[str, int], list[Grid]] | None = None

    def items(self, rank: int, tensors: Mapping[str, Any]) -> list[WriteItem]:
        """Return a rank's writes of the tensors that it holds."""
        items = []
        for number, group in enumerate(self.groups):
            replica = next((index for index, ranks in enumerate(group.replicas) if rank in ranks), None)
            for name, share in zip(group.names, group.shares, strict=True):
                if share != replica:
                    continue
                info = self.infos[name]
                boxes = local_shards(tensors[name]).boxes
                if boxes != self._grid(number, share, name).boxes_of(rank, info.shape):
                    raise RunFailed(f"{name}: rank {rank} holds {boxes} of {info}, which contradicts its mesh")
                items += [WriteItem(name, info, box) for box in boxes]
        for name, grid in self._own.items():
            items += [WriteItem(name, self.infos[name], box) for box in grid.boxes_of(rank, self.infos[name].shape)]
        return items

    def grids(self) -> tuple[dict[str, int], list[Grid]]:
        """Return the index of each tensor's grid, and the grids."""
        if self._numbered is None:
            grids: dict[Grid, int] = {}
            index_of: dict[str, int] = {}
            for number, group in enumerate(self.groups):
                for name, share in zip(group.names, group.shares, strict=True):
                    index_of[name] = grids.setdefault(self._grid(number, share, name), len(grids))
            index_of.update({name: grids.setdefault(grid, len(grids)) for name, grid in self._own.items()})
            self._numbered = index_of, list(grids)
        return self._numbered

    def _grid(self, number: int, share: int, name: str) -> Grid:
        group, shape = self.groups[number], self.infos[name].shape
        key = number, share, shape if group.sharding is not None else None
        grid = self._grids.get(key)
        if grid is None:
            ranks = group.replicas[share]
            grid = group.sharding.grid(name, shape, ranks) if group.sharding is not None else Grid((), (ranks[0],))
            self._grids[key] = grid
        return grid


def _groups(held: Inventories) -> tuple[dict[str, TensorInfo], list[Holders]]:
    infos: dict[str, TensorInfo] = {}
    whole: dict[str, list[int]] = {}
    first: dict[str, tuple[int, int]] = {}
    for number, table in enumerate(held.tables):
        for name, dtype, shape, index in table.rows:
            info = TensorInfo(dtype, shape)
            if infos.setdefault(name, info) != info:
                raise _differ(name, {infos[name], info})
            if index == WHOLE:
                whole.setdefault(name, []).append(number)
            first.setdefault(name, (number, index))
    groups: dict[Any, Holders] = {}
    for name, (number, index) in first.items():
        key = tuple(whole[name]) if index == WHOLE else (number, index, None)
        group = groups.get(key)
        if group is None:
            sharding = None if index == WHOLE else held.tables[number].shardings[index]
            replicas = _replicas(held, number, sharding, whole.get(name, ()))
            group = groups[key] = Holders(sharding, replicas, [], [])
        info = infos[name]
        group.names.append(name)
        group.sizes.append(prod(info.shape) * ELEMENT_BYTES[info.dtype] // len(group.replicas[0]))
    return infos, list(groups.values())


def _replicas(
    held: Inventories, table: int, sharding: MeshSharding | None, tables: Sequence[int]
) -> list[tuple[int, ...]]:
    if sharding is None:
        return [(rank,) for rank in sorted(rank for number in tables for rank in held.ranks[number])]
    if sharding.length is not None:
        return [tuple(range(len(held.meshes)))]
    meshes = dict.fromkeys(held.meshes[rank][sharding.mesh] for rank in held.ranks[table])
    return [tuple(sharding.ranks_of(replica, ranks)) for ranks in meshes for replica in sharding.replicas()]


def _own_grids(held: Inventories, infos: dict[str, TensorInfo]) -> dict[str, Grid]:
    boxes: dict[str, dict[Any, int]] = {}
    flat: dict[str, bool] = {}
    tables = frozenset(infos)
    for rank, of_rank in enumerate(held.own):
        for name, tensor in of_rank.items():
            is_flat = tensor.elements is not None
            if infos.setdefault(name, tensor.info) != tensor.info:
                raise _differ(name, {infos[name], tensor.info})
            if name in tables or flat.setdefault(name, is_flat) != is_flat:
                raise RunFailed(f"{name} is sharded in one way on some ranks, and in another on rank {rank}")
            for part in tensor.boxes if tensor.elements is None else (tensor.elements,):
                boxes.setdefault(name, {}).setdefault(part, rank)
    makers = {name: flat_grid if flat[name] else box_grid for name in boxes}
    return {name: makers[name](name, infos[name].shape, rank_of) for name, rank_of in boxes.items()}


def _differ(name: str, infos: set[TensorInfo]) -> RunFailed:
    return RunFailed(f"{name} is not the same tensor on all ranks: {' and '.join(sorted(map(str, infos)))}")


class SavePlanner:
    """Plans the saves of one run, on one rank; every rank calls `layout` for the same saves."""

    def __init__(self, axis: Axis) -> None:
        self._axis = axis
        self._seen: dict[str, tuple[weakref.ref[Any], tuple[int, ...], torch.dtype]] = {}
        self._inventory: Inventory | None = None
        self._plan: WritePlan | None = None
        self._layout: FileLayout | None = None
        self._snapshot: Snapshot | None = None

    @property
    def plan(self) -> WritePlan:
        """The plan of the last save."""
        assert self._plan is not None, "a save is planned first"
        return self._plan

    def snapshot(self, state: TrainingState, device: torch.device) -> Snapshot:
        """Begin a copy of the state, in the memory of the one before if it fits; a collective."""
        with paused_collection():
            layout = self.layout(state.tensors)
            if self._snapshot is None or self._snapshot.layout != layout:
                self._snapshot = None  # frees its memory before more is allocated
                self._snapshot = Snapshot(layout, device)
            self._snapshot.begin(state.tensors, state.changes_in_forward)
            return self._snapshot

    def free(self) -> None:
        """Free the memory of the snapshot."""
        self._snapshot = None

    def layout(self, tensors: Mapping[str, Any]) -> FileLayout:
        """Return what this rank writes of a state with these tensors; a collective."""
        known = self._inventory if self._has_seen(tensors) else None
        local = known or inventory(tensors)
        unchanged = self._layout is not None and local == self._inventory
        if not all(self._axis.gather(unchanged)) or self._layout is None:
            self._plan = WritePlan(gather_inventories(local, self._axis))
            rank = self._axis.rank
            self._layout = file_layout(rank, self._plan.items(rank, tensors))
            self._inventory = local
        if known is None:
            self._seen = {
                name: (weakref.ref(_memory(tensor)), tensor.shape, tensor.dtype) for name, tensor in tensors.items()
            }
        return self._layout

    def _has_seen(self, tensors: Mapping[str, Any]) -> bool:
        """Return whether these are the objects of the last save, unchanged: forwards may resize buffers."""
        return tensors.keys() == self._seen.keys() and all(
            seen() is _memory(tensor) and tensor.shape == shape and tensor.dtype == dtype
            for (seen, shape, dtype), tensor in zip(self._seen.values(), tensors.values(), strict=True)
        )


def _memory(tensor: Any) -> Any:
    """Return the object that is the same at each save: optimizer state has a new wrapper."""
    return tensor.memory if isinstance(tensor, ShardLike) else tensor
