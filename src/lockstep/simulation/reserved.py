"""The memory of a GPU that a rank takes: what torch's CUDA allocator reserves, and what it doesn't see.

    a request     is rounded up to 512 bytes; above 1 MiB it is large
    a free block  of the same stream and kind, the smallest that is large enough; what is left of it is split off
    no block      a new segment of the GPU: 2 MiB, 20 MiB for large requests below 10 MiB, else a multiple of 2 MiB
    no memory     segments without a tensor go back to the GPU, while everything waits; then the rank is out of memory
    expandable    one segment for each stream and kind, which grows by pages of 2 MiB or, for large requests, 20 MiB

These are the rules of torch's c10/cuda/CUDACachingAllocator with its default settings. `Reserved` has the other lines
with their sources.
"""

from __future__ import annotations

import bisect
import os
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

from lockstep.plan.gpus import GPUCluster
from lockstep.simulation.trace import Change, Sent, StepTrace

MIB = 1 << 20
_SMALLEST = 512
_SMALL, _SMALL_SEGMENT = MIB, 2 * MIB
_MIDDLE, _MIDDLE_SEGMENT = 10 * MIB, 20 * MIB
_CONTEXT = 520 * MIB
"""CUDA's own, with the kernels that are loaded: about 400 MiB and more (pytorch/pytorch issue 109888), 426 on an RTX
6000 Ada (unslothai/unsloth-zoo pull request 1053), 616 MiB (LMCache/LMCache issue 4019)."""
_WORKSPACE = 32 * MIB
"""cuBLAS takes it from torch's allocator: on Hopper and later; 8.1 MiB on others (torch's aten/src/ATen/cuda)."""
_CHANNEL = 14 * MIB
"""Buffers of a NCCL channel to one peer: 10 and 2 x 2 MiB (NVIDIA/nccl issue 1685, 8 x H100)."""
_CHANNELS, _LINK = 32, 450e9
"""Channels of a communicator on a link of that speed; their number grows with it (NVIDIA/nccl issue 986)."""
_TO_ALL = ("all_to_all", "send", "receive")


@dataclass(frozen=True, slots=True)
class Reserved:
    """The memory of a GPU that a rank takes.

    Attributes:
        allocator: What torch's allocator reserves at most (`torch.cuda.max_memory_reserved`), workspaces included.
        workspaces: Of cuBLAS.
        context: Of CUDA.
        nccl: The buffers of its communicators.
        fits: Whether the GPU has as much; None: unknown.
        releases: How often the allocator has to give segments back to free memory, for which the whole GPU waits.
    """

    allocator: int
    workspaces: int
    context: int
    nccl: int
    fits: bool | None = None
    releases: int = 0

    @property
    def total(self) -> int:
        return self.allocator + self.context + self.nccl

    def as_json(self) -> dict[str, int]:
        """Return it for programs."""
        lines = {"allocator": self.allocator, "workspace": self.workspaces, "context": self.context, "nccl": self.nccl}
        return {"reserved_bytes": self.total, **{f"{name}_bytes": size for name, size in lines.items()}}


def reserved_of(trace: StepTrace, cluster: GPUCluster, memory: int | None) -> Reserved:
    """Return what a rank with this work takes of a GPU.

    Args:
        memory: Bytes of the GPU; None: unknown, and without limit.
    """
    grows = expandable_segments(os.environ)
    nccl = nccl_bytes(trace, cluster)
    limit = None if memory is None else memory - _CONTEXT - nccl
    allocator = CachingAllocator(limit, expandable=grows)
    if (fits := allocator.replay(trace.allocations)) is False:
        allocator = CachingAllocator(expandable=grows)
        allocator.replay(trace.allocations)
    return Reserved(allocator.peak, _WORKSPACE, _CONTEXT, nccl, fits, allocator.releases)


def expandable_segments(environment: Mapping[str, str]) -> bool:
    """Return whether the environment asks torch for expandable segments."""
    settings = environment.get("PYTORCH_ALLOC_CONF") or environment.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    return "expandable_segments:true" in settings.lower().replace(" ", "")


def nccl_bytes(trace: StepTrace, cluster: GPUCluster) -> int:
    """Return the bytes of the buffers that NCCL's communicators hold: each group of ranks has one."""
    peers: dict[tuple[int, ...], int] = {}
    for entry in trace.entries:
        if isinstance(entry, Sent):
            most = min(len(entry.ranks), cluster.per_node) - 1 if entry.name in _TO_ALL else 1
            peers[entry.ranks] = max(peers.get(entry.ranks, 1), most)
    channels = max(2, min(_CHANNELS, round(_CHANNELS * cluster.gpu.link / _LINK)))
    return sum(peers.values()) * channels * _CHANNEL


@dataclass(eq=False, slots=True)
class _Block:
    """A part of a segment, between its neighbors there."""

    size: int
    kind: tuple[int, bool]
    address: int
    is_free: bool = False
    before: _Block | None = None
    after: _Block | None = None


class CachingAllocator:
    """Reserves segments, and reuses their blocks, as torch's allocator does.

    Attributes:
        reserved, peak: Bytes of segments, now and at most.
        releases: How often segments had to go back to the GPU.
    """

    def __init__(self, limit: int | None = None, *, expandable: bool = False) -> None:
        self.reserved = self.peak = self.releases = self._used = self._end = 0
        self._limit, self._expandable = limit, expandable
        self._free: dict[tuple[int, bool], list[tuple[int, int, _Block]]] = defaultdict(list)
        self._last: dict[tuple[int, bool], _Block] = {}  # of an expandable segment

    def replay(self, changes: Iterable[Change]) -> bool | None:
        """Allocate and free in this order; return whether the limit allows it, or None without one."""
        held: dict[Hashable, _Block] = {}
        try:
            self.allocate(_WORKSPACE, 0)
            for storage, size, stream in changes:
                if (block := held.pop(storage, None)) is not None:
                    self.free(block)
                if size:
                    held[storage] = self.allocate(size, stream)
        except MemoryError:
            return False
        return None if self._limit is None else True

    def allocate(self, size: int, stream: int) -> _Block:
        """Return a block of at least this size. Raises MemoryError."""
        size = -(-size // _SMALLEST) * _SMALLEST
        kind = (stream, size <= _SMALL)
        free = self._free[kind]
        at = bisect.bisect_left(free, (size, 0))
        block = free.pop(at)[2] if at < len(free) else self._segment(size, kind)
        left = block.size - size
        if left >= _SMALLEST if kind[1] or self._expandable else left > _SMALL:
            rest = _Block(left, kind, block.address + size, before=block, after=block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.size, block.after = size, rest
            if self._last.get(kind) is block:
                self._last[kind] = rest
            self._add(rest)
        block.is_free = False
        self._used += block.size
        return block

    def free(self, block: _Block) -> None:
        """Return a block, joined with free neighbors."""
        self._used -= block.size
        for other in (block.before, block.after):
            if other is not None and other.is_free:
                self._remove(other)
                first, second = (other, block) if other is block.before else (block, other)
                first.size, first.after = first.size + second.size, second.after
                if second.after is not None:
                    second.after.before = first
                if self._last.get(block.kind) is second:
                    self._last[block.kind] = first
                block = first
        self._add(block)

    def _segment(self, size: int, kind: tuple[int, bool]) -> _Block:
        """Return a new segment, or the end of the expandable one, which has grown."""
        last = self._last.get(kind)
        if self._expandable:
            page = _SMALL_SEGMENT if kind[1] else _MIDDLE_SEGMENT
            there = last.size if last is not None and last.is_free else 0
            grown = -(-(size - there) // page) * page
        elif kind[1] or size < _MIDDLE:
            grown = _SMALL_SEGMENT if kind[1] else _MIDDLE_SEGMENT
        else:
            grown = -(-size // _SMALL_SEGMENT) * _SMALL_SEGMENT
        self._reserve(grown)
        block = _Block(grown, kind, self._end, before=last)
        self._end += grown
        if self._expandable:
            if last is not None:
                last.after = block
                if last.is_free:
                    self._remove(last)
                    last.size, last.after, block = last.size + grown, None, last
            self._last[kind] = block
        return block

    def _reserve(self, size: int) -> None:
        if self._limit is not None and self.reserved + size > self._limit:
            self.releases += 1
            if self._expandable:  # pages that nothing uses go back, also those between blocks
                self.reserved = min(self.reserved, max(self._used, self._limit - size))
            else:
                for free in self._free.values():
                    for _, _, block in [each for each in free if each[2].before is each[2].after is None]:
                        self._remove(block)
                        self.reserved -= block.size
            if self.reserved + size > self._limit:
                raise MemoryError
        self.reserved += size
        self.peak = max(self.peak, self.reserved)

    def _add(self, block: _Block) -> None:
        block.is_free = True
        bisect.insort(self._free[block.kind], (block.size, block.address, block))

    def _remove(self, block: _Block) -> None:
        free = self._free[block.kind]
        del free[bisect.bisect_left(free, (block.size, block.address))]
        block.is_free = False
