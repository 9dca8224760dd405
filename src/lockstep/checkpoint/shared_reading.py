"""One rank reads what several ranks need, and passes it on: each byte of a checkpoint is read from the storage once.

    ranks 0-3 hold a b c d whole      rank 0 reads a, rank 1 b, ...       hashes are checked by the rank that reads

    round 1    0 --a--> 1 --b--> 2 --c--> 3 --d--> 0        each rank sends to the next one what it got last
    round 2    0 --d--> 1 --a--> 2 --b--> 3 --c--> 0        in buffers of 32 MiB

The ranks with equal shards are those of `write_plan`: all under ddp, the replicas of each shard under hybrid sharding,
a pipeline's stage. If as many ranks wrote the checkpoint, each reads what it wrote: in memory, its file is on its host.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, cast

import torch

from lockstep.checkpoint.manifest import ELEMENT_BYTES, Manifest
from lockstep.checkpoint.write_plan import Holders, WritePlan

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.core.protocols import Axis

_BUFFER_BYTES = 2**25


@dataclass(frozen=True, slots=True)
class _Ring:
    """Ranks with equal shards of some tensors, in order; this one's position; and the tensors that each reads."""

    peers: Sequence[int]
    position: int
    shares: Sequence[Sequence[str]]


class SharedReading:
    """The tensors that this rank reads itself, and the exchange of the others; `plan` is of the live state."""

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
        self._received = {
            name
            for ring in self._rings
            for position, names in enumerate(ring.shares)
            for name in names
            if position != ring.position
        }

    def is_received(self, name: str) -> bool:
        """Return whether another rank reads this tensor for this one."""
        return name in self._received

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
    """Return the replica that alone wrote the tensors of a grid, by the grid's index."""
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
