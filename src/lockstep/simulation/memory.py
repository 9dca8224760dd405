"""The peak memory of an update by category: which tensors hold it.

    every operation   -->  blocks (a tensor's storage each), when they are made, resized and freed
    after an update   -->  what each block was: a parameter, a gradient, optimizer state, ...
    replay            -->  bytes by category at the peak

The bytes are those of tensors. An allocator rounds each block up, and keeps some for itself.
"""

from __future__ import annotations

import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, Literal, get_args
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.distributed.shard_boxes import local_tensor

Category = Literal[
    "parameters", "gradients", "optimizer", "activations", "logits", "casts", "communication", "buffers", "other"
]
CATEGORIES: tuple[Category, ...] = get_args(Category)
"""Categories in the order of a table's columns.

communication   parameters gathered from other ranks, gradients on their way to them, buckets
casts           copies of parameters in the dtype that a forward computes in
logits          the outputs over a vocabulary, their loss and gradient
activations     what a forward computes and keeps for the backward, and its gradients
other           what is made between updates, and belongs to none of these
"""

_COMMUNICATION = ("all_gather_copy_in", "split_with_sizes_copy", "chunk_cat")
_FLAT = 1 << 20  # elements of a tensor of one dim from which it is a bucket
_RELEASE_S = 0.002  # until a thread of gloo has forgotten the tensors of a collective that is done
aten = torch.ops.aten


@dataclass(eq=False, slots=True)
class StorageRecord:
    """The storage of tensors on the device.

    Attributes:
        category: As far as its operation shows; owners overrule it.
        cast_of: The block of which it is a copy in another dtype.
    """

    category: Category
    shape: tuple[int, ...]
    bytes: int = 0
    in_backward: bool = False
    cast_of: StorageRecord | None = None


@dataclass(frozen=True, slots=True)
class Peak:
    """The peak of the bytes that tensors hold on a device, and what held them then."""

    bytes: int
    by_category: Mapping[Category, int]


class MemoryLedger:
    """Records the blocks of a device while operations run.

    Args:
        device_type: Of the device; other tensors aren't counted.
        vocabulary: Sizes of the last dim by which logits are recognized.
    """

    def __init__(self, device_type: str, vocabulary: Iterable[int] = ()) -> None:
        self.phase: Category = "other"
        self._device_type = device_type
        self.vocabulary = frozenset(vocabulary)
        self._blocks: Any = WeakIdKeyDictionary()
        self._changes: list[tuple[StorageRecord, int]] = []
        self._owned: dict[StorageRecord, Category] = {}
        self._parameter_shapes: set[tuple[int, ...]] = set()
        self._gathered_sizes: set[int] = set()

    def see(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], outputs: Sequence[Tensor]) -> None:
        """Record the blocks that an operation has made."""
        sends = _sends(func)
        for tensor in outputs:
            if tensor.device.type != self._device_type:
                continue
            storage = tensor.untyped_storage()
            block = self._blocks.get(storage)
            if block is None:
                block = self._made(storage, tensor)
                if func is aten._to_copy.default and isinstance(args[0], Tensor):
                    block.cast_of = self._blocks.get(args[0].untyped_storage())
            if sends:
                block.category = "communication"
        if sends:
            for tensor in _flat(kwargs.get("out")):
                if (block := self._blocks.get(tensor.untyped_storage())) is not None:
                    block.category = "communication"

    def own(self, category: Category, tensors: Iterable[Tensor]) -> None:
        """Record what tensors are."""
        for tensor in tensors:
            local = local_tensor(tensor)
            if local.device.type == self._device_type:
                storage = local.untyped_storage()
                block = self._blocks.get(storage)
                if block is None:
                    block = self._made(storage, local)
                self._owned[block] = category

    def own_model(self, model: nn.Module, parts: int = 1, gathered: Iterable[tuple[int, ...]] = ()) -> None:
        """Record parameters and buffers.

        Args:
            parts: Tensor-parallel ranks, each of which computes with a part of a matrix.
            gathered: The shapes of parameters that are elsewhere, and flat until they have been gathered.
        """
        self.own("buffers", model.buffers())
        self.own("parameters", model.parameters())
        self._gathered_sizes = {prod(shape) for shape in gathered}
        shapes = {tuple(parameter.shape) for parameter in model.parameters()} | set(gathered)
        shapes = {shape for shape in shapes if len(shape) > 1}
        for shape in shapes:
            self._parameter_shapes.update(
                (*shape[:dim], size // parts, *shape[dim + 1 :]) for dim, size in enumerate(shape)
            )
        self._parameter_shapes |= shapes

    def peak(self) -> Peak:
        """Return the peak since the last `restart`."""
        held: Counter[Category] = Counter()
        total = highest = 0
        at_peak: dict[Category, int] = {}
        for block, change in self._changes:
            held[self._category(block)] += change
            total += change
            if total > highest:
                highest, at_peak = total, dict(held)
        return Peak(highest, {category: at_peak.get(category, 0) for category in CATEGORIES})

    def restart(self) -> None:
        """Forget the peak; what is held now stays recorded."""
        now: dict[StorageRecord, int] = {}
        for block, change in self._changes:
            now[block] = now.get(block, 0) + change
        self._changes = [(block, held) for block, held in now.items() if held]

    def _category(self, block: StorageRecord) -> Category:
        owner = self._owned.get(block)
        if owner is not None:
            return owner
        if block.category == "communication":
            return block.category
        if block.cast_of is not None and self._category(block.cast_of) in ("parameters", "communication"):
            return "casts"
        if block.shape and block.shape[-1] in self.vocabulary and block.shape not in self._parameter_shapes:
            return "logits"
        is_flat = len(block.shape) == 1 and (block.shape[0] >= _FLAT or block.shape[0] in self._gathered_sizes)
        if is_flat and block.category == "activations":
            return "communication"
        if block.in_backward and (block.shape in self._parameter_shapes or block.shape[::-1] in self._parameter_shapes):
            return "gradients"
        return block.category

    @contextmanager
    def temporary(self) -> Iterator[None]:
        """Count what is made within the block as freed at its end."""
        first = len(self._changes)
        yield
        for block in {block for block, _ in self._changes[first:]}:
            self._set_bytes(block, 0)

    def _made(self, storage: Any, tensor: Tensor) -> StorageRecord:
        in_backward = torch._C._current_graph_task_id() != -1
        flat = (storage.nbytes() // tensor.element_size(),)  # of a part of a bucket, the whole
        block = StorageRecord(self.phase, flat if tensor.dim() == 1 else tuple(tensor.shape), in_backward=in_backward)
        self._blocks[storage] = block
        self._set_bytes(block, storage.nbytes())
        weakref.finalize(storage, self._set_bytes, block, 0).atexit = False
        return block

    def _resized(self, storage: Any) -> None:
        if (block := self._blocks.get(storage)) is not None:
            block.category = "communication"  # FSDP allocates and frees what it gathers so
            self._set_bytes(block, storage.nbytes())

    def _set_bytes(self, block: StorageRecord, size: int) -> None:
        if size != block.bytes:
            self._changes.append((block, size - block.bytes))
            block.bytes = size


@contextmanager
def resizes_seen(ledger: MemoryLedger) -> Iterator[None]:
    """Show the ledger storages that are resized: FSDP frees and allocates gathered parameters so."""
    original: Callable[..., Any] = torch.UntypedStorage.resize_

    def resize(storage: Any, size: int) -> Any:
        result = original(storage, size)
        ledger._resized(storage)
        return result

    with patch.object(torch.UntypedStorage, "resize_", resize):
        yield


class Watched(TorchDispatchMode):
    """Runs operations as always, and shows them to a ledger: on a device that exists."""

    def __init__(self, ledger: MemoryLedger) -> None:
        super().__init__()
        self._ledger = ledger

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d" and not _is_point_to_point(func):  # both sides of which may send first
            self._finish(result)
        self._ledger.see(func, args, kwargs or {}, _flat(result))
        return result

    def _finish(self, result: Any) -> None:
        """Wait for a collective: gloo's threads free what they send when they get to it, streams in order."""
        with self, self._ledger.temporary():  # gloo's copies are seen as it waits
            for work in pytree.tree_leaves(result):
                if isinstance(work, torch.ScriptObject):
                    work.wait()  # type: ignore[attr-defined]
        time.sleep(_RELEASE_S)


@cache
def _is_point_to_point(func: Any) -> bool:
    return func.name().partition("::")[2].startswith(("send", "recv"))


@cache
def _sends(func: Any) -> bool:
    return any(name in func.name() for name in _COMMUNICATION)


def _flat(values: Any) -> list[Tensor]:
    if isinstance(values, Tensor):
        return [values]
    return [tensor for value in values for tensor in _flat(value)] if isinstance(values, list | tuple) else []
