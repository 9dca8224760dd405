"""The peak memory of an update by category and module: which tensors hold it.

Every operation records blocks (a tensor's storage each), and after an update what each was, such as a parameter. The
bytes are the tensors'. `lockstep.simulation.reserved` has those that an allocator takes for them.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, repeat
from math import prod
from typing import TYPE_CHECKING, Any, Literal, get_args
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from lockstep.distributed.shard_boxes import local_tensor
from lockstep.simulation import device
from lockstep.simulation.repeats import Call, tensors_in
from lockstep.simulation.trace import Change

if TYPE_CHECKING:
    from lockstep.simulation.reserved import Reserved

Category = Literal[
    "parameters", "gradients", "optimizer", "activations", "logits", "casts", "communication", "buffers", "other"
]
HEADS: Mapping[Category, str] = {"parameters": "params", "gradients": "grads", "communication": "comm."}
"""Shorter names for the heads of tables."""
CATEGORIES: tuple[Category, ...] = get_args(Category)
"""Categories in the order of a table's columns.

communication   parameters gathered from other ranks, gradients on their way to them, buckets
casts           copies of parameters in the dtype that a forward computes in
logits          the outputs over a vocabulary, their loss and gradient
activations     what a forward computes and keeps for the backward, and its gradients
other           what is made between updates, and belongs to none of these
"""

SEVERAL = "(several modules)"
"""The module of what holds tensors of more than one."""
_COMMUNICATION = ("all_gather_copy_in", "split_with_sizes_copy", "chunk_cat")
_FLAT = 1 << 20  # elements; a tensor of one dim with as many is a bucket
_RELEASE_S = 0.002  # until a thread of gloo has forgotten the tensors of a collective that is done
aten = torch.ops.aten


@dataclass(eq=False, slots=True)
class StorageRecord:
    """The storage of tensors on the device.

    Attributes:
        category: As far as its operation shows; owners overrule it.
        cast_of: The block that it copies in another dtype.
        module: The module that made it in its forward or backward; empty: none.
    """

    category: Category
    shape: tuple[int, ...]
    bytes: int = 0
    in_backward: bool = False
    cast_of: StorageRecord | None = None
    module: str = ""


class _Record:
    """An attribute of a storage, which lasts as long as its memory: the block that a ledger has recorded."""

    __slots__ = ("block", "ledger")

    def __init__(self, ledger: MemoryLedger, block: StorageRecord) -> None:
        self.ledger, self.block = ledger, block

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.ledger._set_bytes(self.block, 0)


@dataclass(frozen=True, slots=True)
class Peak:
    """The peak of the bytes that tensors hold on a device, and what held them then; of no module: an empty name.

    Attributes:
        reserved: What that takes of a GPU, if one is named.
    """

    bytes: int
    by_category: Mapping[Category, int]
    by_module: Mapping[str, Mapping[Category, int]] = field(default_factory=dict, compare=False)
    reserved: Reserved | None = None


class MemoryLedger:
    """Records the blocks of a device while operations run; logits have a last dim of a size in `vocabulary`."""

    def __init__(self, device_type: str, vocabulary: Iterable[int] = ()) -> None:
        self.phase: Category = "other"
        self._device_type = device_type
        self.vocabulary = frozenset(vocabulary)
        self._changes: list[tuple[StorageRecord, int, int]] = []  # block, bytes more, stream
        self._owned: dict[StorageRecord, Category] = {}
        self._forwards: list[str] = []  # modules that compute, the innermost last
        self._head = ""  # the last module that returns logits
        self._parameter_shapes: set[tuple[int, ...]] = set()
        self._gathered_sizes: set[int] = set()

    def see(self, call: Call) -> None:
        """Record the blocks that an operation has made."""
        func, args, kwargs, outputs, _ = call
        sends = _sends(func)
        for tensor in outputs:
            if tensor.device.type != self._device_type:
                continue
            storage = tensor.untyped_storage()
            block = self._block_of(storage)
            if block is None:
                block = self._made(storage, tensor)
                block.module = self._module_of(block, args)
                if func is aten._to_copy.default and isinstance(args[0], Tensor):
                    block.cast_of = self._block_of(args[0].untyped_storage())
            if sends:
                block.category = "communication"
        if sends:
            for tensor in tensors_in(kwargs.get("out")):
                if (block := self._block_of(tensor.untyped_storage())) is not None:
                    block.category = "communication"

    def own(self, category: Category, tensors: Iterable[Tensor], modules: Iterable[str] = repeat("")) -> None:
        """Record what tensors are, and their modules."""
        for tensor, module in zip(tensors, modules, strict=False):
            local = local_tensor(tensor)
            if local.device.type == self._device_type:
                storage = local.untyped_storage()
                block = self._block_of(storage)
                if block is None:
                    block = self._made(storage, local)
                shares = self._owned.get(block) == category and block.module != module
                self._owned[block] = category
                block.module = SEVERAL if shares else module

    def own_model(self, model: nn.Module, parts: int = 1, gathered: Iterable[tuple[int, ...]] = ()) -> None:
        """Record parameters and buffers.

        Args:
            parts: Tensor-parallel ranks; each computes with a part of a matrix.
            gathered: The shapes of parameters that are elsewhere, and flat until they have been gathered.
        """
        buffers, parameters = dict(model.named_buffers()), dict(model.named_parameters())
        self.own("buffers", buffers.values(), map(module_of, buffers))
        self.own("parameters", parameters.values(), map(module_of, parameters))
        self._gathered_sizes = {prod(shape) for shape in gathered}
        shapes = {tuple(parameter.shape) for parameter in model.parameters()} | set(gathered)
        shapes = {shape for shape in shapes if len(shape) > 1}
        for shape in shapes:
            for dim, size in enumerate(shape):
                self._parameter_shapes.add((*shape[:dim], size // parts, *shape[dim + 1 :]))
        self._parameter_shapes |= shapes

    def peak(self) -> Peak:
        """Return the peak since the last `restart`."""
        totals = list(accumulate((change for _, change, _ in self._changes), initial=0))
        highest = max(totals)
        length = totals.index(highest)
        by_category: dict[Category, int] = dict.fromkeys(CATEGORIES, 0)
        held: dict[str, Counter[Category]] = {}
        for block, change, _ in self._changes[:length]:
            category = self._category(block)
            by_category[category] += change
            held.setdefault(block.module, Counter())[category] += change
        by_module = {module: {name: size for name, size in of.items() if size} for module, of in held.items()}
        return Peak(highest, by_category, {module: of for module, of in by_module.items() if of})

    def restart(self) -> None:
        """Forget the peak; what is held now stays recorded."""
        now: dict[StorageRecord, tuple[int, int]] = {}
        for block, change, stream in self._changes:
            now[block] = (now.get(block, (0, 0))[0] + change, stream)
        self._changes = [(block, held, stream) for block, (held, stream) in now.items() if held]

    def allocations(self) -> list[Change]:
        """Return the blocks that got or lost memory since the last `restart`, in order."""
        held: Counter[StorageRecord] = Counter()
        changes = []
        for block, change, stream in self._changes:
            held[block] += change
            changes.append(Change(id(block), held[block], stream))
        return changes

    def _category(self, block: StorageRecord) -> Category:
        owner = self._owned.get(block)
        if owner is not None:
            return owner
        if block.category == "communication":
            return block.category
        if block.cast_of is not None and self._category(block.cast_of) in ("parameters", "communication"):
            return "casts"
        if self._may_be_logits(block.shape) and (not self._head or block.module in ("", self._head)):
            return "logits"
        is_flat = len(block.shape) == 1 and (block.shape[0] >= _FLAT or block.shape[0] in self._gathered_sizes)
        if is_flat and block.category == "activations":
            return "communication"
        if block.in_backward and (block.shape in self._parameter_shapes or block.shape[::-1] in self._parameter_shapes):
            return "gradients"
        return block.category

    def _may_be_logits(self, shape: tuple[int, ...]) -> bool:
        return bool(shape) and shape[-1] in self.vocabulary and shape not in self._parameter_shapes

    @contextmanager
    def temporary(self) -> Iterator[None]:
        """Count what is made within the block as freed at its end."""
        first = len(self._changes)
        yield
        for block in {block for block, _, _ in self._changes[first:]}:
            self._set_bytes(block, 0)

    def _module_of(self, block: StorageRecord, args: tuple[Any, ...]) -> str:
        if self._forwards:
            return self._forwards[-1]
        if not block.in_backward:
            return ""
        inputs = [self._block_of(tensor.untyped_storage()) for tensor in tensors_in(args)]
        known = [each for each in inputs if each is not None and each.module]
        return min(known, key=lambda each: each.in_backward).module if known else ""

    @contextmanager
    def modules_seen(self, model: nn.Module) -> Iterator[None]:
        """Record the modules of a model that compute while the block runs."""
        names = {module: name for name, module in model.named_modules()}

        def enter(module: nn.Module, inputs: Any) -> None:
            if module in names:
                self._forwards.append(names[module])

        def leave(module: nn.Module, inputs: Any, outputs: Any) -> None:
            if module in names and self._forwards:
                self._forwards.pop()
                if isinstance(outputs, Tensor) and self._may_be_logits(tuple(outputs.shape)):
                    self._head = names[module] or self._head

        handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
        try:
            yield
        finally:
            self._forwards.clear()
            for handle in handles:
                handle.remove()

    def _made(self, storage: Any, tensor: Tensor) -> StorageRecord:
        in_backward = torch._C._current_graph_task_id() != -1
        flat = (storage.nbytes() // tensor.element_size(),)  # of a part of a bucket, the whole
        block = StorageRecord(self.phase, flat if tensor.dim() == 1 else tuple(tensor.shape), in_backward=in_backward)
        self._set_bytes(block, storage.nbytes())
        storage.recorded = _Record(self, block)
        return block

    def _block_of(self, storage: Any) -> StorageRecord | None:
        record = storage.__dict__.get("recorded")
        return record.block if record is not None and record.ledger is self else None

    def _resized(self, storage: Any) -> None:
        if (block := self._block_of(storage)) is not None:
            block.category = "communication"  # FSDP allocates and frees what it gathers so
            self._set_bytes(block, storage.nbytes())

    def _set_bytes(self, block: StorageRecord, size: int) -> None:
        if size != block.bytes:
            self._changes.append((block, size - block.bytes, device.current_stream()))
            block.bytes = size


def module_of(parameter: str) -> str:
    """Return the name of the module that has a parameter or a buffer."""
    return parameter.rpartition(".")[0]


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
        if func.namespace == "c10d" and not _is_point_to_point(func) and _has_threads(tensors_in(args)):
            self._finish(result)
        self._ledger.see(Call(func, args, kwargs or {}, tensors_in(result), {}))
        return result

    def _finish(self, result: Any) -> None:
        """Wait for a collective: gloo's threads free what they send when they get to it."""
        with self, self._ledger.temporary():  # gloo's copies are seen as it waits
            for work in pytree.tree_leaves(result):
                if isinstance(work, torch.ScriptObject):
                    work.wait()  # type: ignore[attr-defined]
        time.sleep(_RELEASE_S)


def _has_threads(tensors: Iterable[Tensor]) -> bool:
    """Return whether threads exchange tensors, as gloo's do; NCCL has streams, and no work where its caller waits."""
    return dist.get_backend() == "gloo" or any(tensor.device.type == "cpu" for tensor in tensors)


@cache
def _is_point_to_point(func: Any) -> bool:
    """Return whether it is a send or a receive, where both sides may send first."""
    return func.name().partition("::")[2].startswith(("send", "recv"))


@cache
def _sends(func: Any) -> bool:
    return any(name in func.name() for name in _COMMUNICATION)
