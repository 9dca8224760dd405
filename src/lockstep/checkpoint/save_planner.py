"""Plans what each rank writes of a state: by all ranks once, and again when a tensor was added or removed."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint.file_layout import FileLayout, file_layout
from lockstep.checkpoint.inventory import Inventory, gather_inventories, inventory
from lockstep.checkpoint.manifest import ELEMENT_BYTES
from lockstep.checkpoint.snapshot import Snapshot, snapshot_of
from lockstep.checkpoint.write_plan import WritePlan
from lockstep.core.collection import paused_collection
from lockstep.distributed.shard_boxes import ShardLike

if TYPE_CHECKING:
    import torch

    from lockstep.core.protocols import Axis
    from lockstep.core.records import TrainingState


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
                self._snapshot = snapshot_of(state.tensors, device, layout)
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
            self._plan = WritePlan(gather_inventories(local, self._axis), ELEMENT_BYTES)
            rank = self._axis.rank
            self._layout = file_layout(rank, self._plan.items(rank, tensors))
            self._inventory = local
        if known is None:
            self._seen = {
                name: (weakref.ref(_memory(tensor)), tensor.shape, tensor.dtype) for name, tensor in tensors.items()
            }
        return self._layout

    def _has_seen(self, tensors: Mapping[str, Any]) -> bool:
        """Return whether these are the objects of the save before, as they were: forwards may resize buffers."""
        return tensors.keys() == self._seen.keys() and all(
            seen() is _memory(tensor) and tensor.shape == shape and tensor.dtype == dtype
            for (seen, shape, dtype), tensor in zip(self._seen.values(), tensors.values(), strict=True)
        )


def _memory(tensor: Any) -> Any:
    """Return the object that is the same at each save: optimizer state has a new wrapper."""
    return tensor.memory if isinstance(tensor, ShardLike) else tensor
