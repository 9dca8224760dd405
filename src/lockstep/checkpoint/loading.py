"""Loads a checkpoint: all ranks read the same one, each its part, and all agree before anything is applied.

newest --> manifest, from rank 0 to all --> each rank reads and verifies --> all intact? --> passed on --> restored
   ^                                                                             no
   '------- the one before it <--------------------------------------------------'
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, cast

import torch
from torch import Tensor

from lockstep.checkpoint import manifest as manifests
from lockstep.checkpoint.inventory import gather_inventories, inventory
from lockstep.checkpoint.manifest import ELEMENT_BYTES, CorruptCheckpoint, Manifest
from lockstep.checkpoint.memory_saving import WithMemory
from lockstep.checkpoint.reading import Reader, ReadItem, checked_manifest, manifest_bytes
from lockstep.checkpoint.storage import ReadableStorage, Storage, names_by_step
from lockstep.checkpoint.write_plan import Holders, WritePlan
from lockstep.core.errors import RunFailed
from lockstep.core.failure_kinds import FailureKind
from lockstep.core.formatting import listed
from lockstep.core.protocols import Axis
from lockstep.core.records import TrainingState
from lockstep.distributed.shard_boxes import TensorInfo, box_view, dtype_name, local_shape, local_shards


@dataclass(frozen=True, slots=True)
class LoadedCheckpoint:
    """A checkpoint in memory, verified on all ranks.

    Attributes:
        state: This rank's shards, on the CPU, under the names of the live tensors.
        broken: Why newer checkpoints could not be used, by name.
    """

    manifest: Manifest
    state: TrainingState
    broken: Mapping[str, str]


def load_newest(
    storage: ReadableStorage,
    axis: Axis,
    live: TrainingState,
    step: int | None = None,
    check: Callable[[Manifest], Collection[str]] = lambda manifest: (),
    until: int | None = None,
) -> LoadedCheckpoint | None:
    """Load the newest checkpoint that verifies, or the one of `step`; return None if there is none. All ranks together.

    Args:
        check: Called with a manifest before its tensors are read; raises, alike on all ranks, if it must not be loaded,
            and CorruptCheckpoint if its state is invalid. Returns the tensors that may have another dtype than here.
        until: Checkpoints of later steps are ignored.

    Raises:
        RunFailed: None of the checkpoints can be read, or not the one of `step`, or it is of another model.
    """
    broken: dict[str, str] = {}
    names = cast("list[str] | str", axis.broadcast(_candidates(storage, step, until) if axis.rank == 0 else None))
    if isinstance(names, str):
        raise RunFailed(names)
    for name in names:
        loaded = _load(storage, axis, live, name, check)
        if not isinstance(loaded, str):
            return LoadedCheckpoint(*loaded, broken)
        broken[name] = loaded
    if not broken:
        return None
    shown = "".join(f"\n  {name}: {reason}" for name, reason in broken.items())
    raise RunFailed(f"{storage.place} has no checkpoint that can be used:{shown}", kind=FailureKind.DAMAGED)


def move_newer_aside(storage: Storage, step: int, broken: Mapping[str, str]) -> list[str]:
    """Move aside all checkpoints after `step`, where the run resumes; on rank 0. Return where they are."""
    moved = []
    for later, name in names_by_step(storage.names()).items():
        if later > step:
            moved.append(storage.move_aside(name, "broken" if name in broken else "superseded"))
    return moved


def _candidates(storage: ReadableStorage, step: int | None, until: int | None) -> list[str] | str:
    try:
        names = names_by_step(storage.names())
    except OSError as error:
        return f"can't list {storage.place}: {error.strerror or error}"
    if step is None:
        return [names[known] for known in sorted(names, reverse=True) if until is None or known <= until]
    if step not in names:
        return f"{storage.place} has no checkpoint of step {step}; it has: {', '.join(map(str, names)) or 'none'}"
    return [names[step]]


def _load(
    storage: ReadableStorage, axis: Axis, live: TrainingState, name: str, check: Callable[[Manifest], Collection[str]]
) -> tuple[Manifest, TrainingState] | str:
    stored: tuple[bytes | str, bool] | None = None
    if axis.rank == 0:
        # what is in the memory of all ranks' host costs less to read than to pass on
        near = isinstance(storage, WithMemory) and storage.is_near(name)
        try:
            content = manifest_bytes(storage, name)
            checked_manifest(storage, name, content)
            stored = content, near
        except CorruptCheckpoint as fault:
            stored = str(fault), near
    data, near = cast("tuple[bytes | str, bool]", axis.broadcast(stored))
    if isinstance(data, str):
        return data
    manifest = manifests.from_bytes(data)
    try:
        recast = check(manifest)
    except CorruptCheckpoint as fault:
        return str(fault)
    mismatch = _mismatch(manifest, live, recast)
    shared: SharedReading | None = None
    if not near:
        held = gather_inventories(inventory(live.tensors), axis)
        shared = SharedReading(WritePlan(held), manifest, axis)
    state = _read(storage, name, manifest, live, shared) if mismatch is None else None
    axis.barrier()  # some ranks may read more, or from a slower disk
    faults = axis.gather(state if isinstance(state, str) else None)
    if mismatch is not None:  # another model's, so not broken: it stays where it is
        raise RunFailed(f"{storage.place}/{name} doesn't fit this run: {mismatch}")
    first_fault = next((fault for fault in faults if fault is not None), None)
    if first_fault is not None:
        return str(first_fault)
    loaded = cast("TrainingState", state)
    if shared is not None:
        shared.exchange(loaded.tensors)
    return manifest, loaded


def _read(
    storage: ReadableStorage, name: str, manifest: Manifest, live: TrainingState, shared: SharedReading | None
) -> TrainingState | str:
    tensors: dict[str, Tensor] = {}
    items: list[ReadItem] = []
    for key, entry in manifest.tensors.items():
        like = live.tensors.get(like_of(key, entry.shape, live.tensors) or key)
        boxes = (entry.info.whole,) if like is None else local_shards(like).boxes
        shape = entry.shape if like is None else local_shape(like)
        try:
            memory = torch.empty(shape, dtype=getattr(torch, entry.dtype))
        except RuntimeError:
            return f"{key} is {entry.info} in the manifest, and there is no memory for it here ({entry.size:,} bytes)"
        tensors[key] = memory
        if shared is None or key not in shared.received:
            items += [ReadItem(key, box, box_view(memory, boxes, box)) for box in boxes]
    try:
        Reader(storage, name, manifest).read(items)
    except CorruptCheckpoint as fault:
        return str(fault)
    return TrainingState(tensors, manifest.state)


def _mismatch(manifest: Manifest, live: TrainingState, recast: Collection[str]) -> str | None:
    """Return how names and shapes of the model differ. Optimizer state that is created lazily may be missing."""
    saved, own = manifest.tensors, live.tensors
    missing, unexpected = (
        [name.removeprefix("model.") for name in names if name not in others and name.startswith("model.")]
        for names, others in ((own, saved), (saved, own))
    )
    if missing:
        return f"it has no {listed(missing, 3)}"
    if unexpected:
        return f"it also has {listed(unexpected, 3)}, which the model lacks"
    for name, tensor in own.items():
        here = TensorInfo(dtype_name(tensor.dtype), tuple(tensor.shape))
        there = saved[name].info if name in saved else here
        is_float: bool = getattr(torch, there.dtype).is_floating_point
        if there.shape != here.shape or (is_float != tensor.dtype.is_floating_point and name not in recast):
            return f"{name} is {there} in the checkpoint, and {here} in this run"
    return None


_BUFFER_BYTES = 2**25


@dataclass(frozen=True, slots=True)
class _Ring:
    """Ranks with equal shards of some tensors, in order; this one's position; and the tensors that each reads."""

    peers: Sequence[int]
    position: int
    shares: Sequence[Sequence[str]]


class SharedReading:
    """The tensors that this rank reads itself, and the exchange of the others: a storage is read once for all ranks.

        ranks 0-3 hold a b c d whole      rank 0 reads a, rank 1 b, ...       hashes are checked by the rank that reads

        round 1    0 --a--> 1 --b--> 2 --c--> 3 --d--> 0        each rank sends to the next one what it got last
        round 2    0 --d--> 1 --a--> 2 --b--> 3 --c--> 0        in buffers of 32 MiB

    `plan`, of the live state, knows the ranks with equal shards. If as many ranks wrote the checkpoint, each reads
    what it wrote: a snapshot in memory has a rank's file on its own host.
    """

    def __init__(self, plan: WritePlan, manifest: Manifest, axis: Axis) -> None:
        self._axis = axis
        everyone = Holders(None, [(rank,) for rank in range(axis.size)], [], [])
        held = [Holders(group.sharding, group.replicas, [], []) for group in plan.groups]
        group_of = {name: number for number, group in enumerate(plan.groups) for name in group.names}
        for name, entry in manifest.tensors.items():
            known = like_of(name, entry.shape, plan.infos) or name
            if known in plan.infos and known not in group_of:  # shards that no two ranks have in common
                continue
            group = held[group_of[known]] if known in group_of else everyone
            group.names.append(name)
            group.sizes.append(prod(entry.shape) * ELEMENT_BYTES[entry.dtype] // len(group.replicas[0]))
        self._rings = [ring for group in [*held, everyone] if (ring := _ring(group, manifest, axis)) is not None]
        self.received = {  # by this rank from others
            name
            for ring in self._rings
            for position, names in enumerate(ring.shares)
            for name in names
            if position != ring.position
        }

    def exchange(self, tensors: Mapping[str, Tensor]) -> None:
        """Fill this rank's tensors (contiguous, on the CPU) that other ranks have read. All ranks together."""
        for ring in self._rings:
            if len(ring.peers) == self._axis.size and not any(ring.shares[1:]):
                self._copy_first([tensors[name] for name in ring.shares[0]])
            else:
                self._pass_around(ring, tensors)

    def _copy_first(self, tensors: Sequence[Tensor]) -> None:
        for views in _buffers(tensors):
            packed = torch.cat(views).numpy().tobytes() if self._axis.rank == 0 else None
            data = cast("bytes", self._axis.broadcast(packed))
            if self._axis.rank != 0:
                _unpack(torch.frombuffer(bytearray(data), dtype=torch.uint8), views)

    def _pass_around(self, ring: _Ring, tensors: Mapping[str, Tensor]) -> None:
        number = len(ring.peers)
        after, before = ring.peers[(ring.position + 1) % number], ring.peers[ring.position - 1]
        shares = [[list(views) for views in _buffers([tensors[name] for name in names])] for names in ring.shares]
        for turn in range(number - 1):
            sent, received = shares[(ring.position - turn) % number], shares[(ring.position - turn - 1) % number]
            for index in range(max(len(sent), len(received))):
                outgoing = torch.cat(sent[index]) if index < len(sent) else None
                size = sum(view.numel() for view in received[index]) if index < len(received) else None
                incoming = None if size is None else torch.empty(size, dtype=torch.uint8)
                self._axis.swap(after, outgoing, before, incoming)
                if incoming is not None:
                    _unpack(incoming, received[index])


def like_of(name: str, shape: tuple[int, ...], live: Mapping[str, Any]) -> str | None:
    """Return the live tensor that a saved one is sharded like: itself, or the parameter of optimizer state.

    An optimizer may make its state in the first update.
    """
    if name in live:
        return name
    parameter = f"model.{name.partition('.')[2].partition('.')[2]}"
    is_state = name.startswith("optimizer.") and parameter in live and tuple(live[parameter].shape) == shape
    return parameter if is_state else None


def _ring(group: Holders, manifest: Manifest, axis: Axis) -> _Ring | None:
    position = next((index for index, ranks in enumerate(group.replicas) if axis.rank in ranks), None)
    if position is None or len(group.replicas) < 2:
        return None
    cell = list(group.replicas[position]).index(axis.rank)
    shares: list[list[str]] = [[] for _ in group.replicas]
    written = _writers(group, manifest) if manifest.ranks == axis.size else {}
    for name, share in zip(group.names, group.shares, strict=True):
        shares[written.get(manifest.tensors[name].grid, share)].append(name)
    return _Ring([ranks[cell] for ranks in group.replicas], position, shares)


def _writers(group: Holders, manifest: Manifest) -> dict[int, int]:
    replica_of = {rank: number for number, ranks in enumerate(group.replicas) for rank in ranks}
    writers = {}
    for index in {manifest.tensors[name].grid for name in group.names}:
        replicas = {replica_of.get(rank) for rank in manifest.grids[index].ranks}
        if len(replicas) == 1 and (replica := replicas.pop()) is not None:
            writers[index] = replica
    return writers


def _buffers(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    views: list[Tensor] = []
    free = _BUFFER_BYTES
    for tensor in tensors:
        rest = tensor.reshape(-1).view(torch.uint8)
        while rest.numel():
            view, rest = rest[:free], rest[free:]
            views.append(view)
            free -= view.numel()
            if not free:
                yield views
                views, free = [], _BUFFER_BYTES
    if views:
        yield views


def _unpack(packed: Tensor, views: list[Tensor]) -> None:
    torch._foreach_copy_(views, list(torch.split(packed, [view.numel() for view in views])))
