"""Activation offload: activations wait in the host's page-locked memory until the backward needs them.

The copies are on the computation's own stream, so that neither side needs an event, and the host never waits. What
several operations save is copied once. The last block keeps its activations, which the backward needs first. With
activation checkpointing, blocks' inputs are copied. On the device stay activations that are computed again, weights,
their views and casts, DTensors, and small tensors.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from lockstep.core.protocols import Transform

LEAST_BYTES = 1 << 20
"""Bytes of memory below which a copy takes longer to start than it saves."""
_LARGEST_SHARE = 4  # a tensor that is less than this part of its memory is not worth all of it
_VIEWS = (
    "ToCopy", "T", "Transpose", "View", "UnsafeView", "ReshapeAlias", "Permute", "Alias", "Clone", "Select", "Slice",
    "Split", "SplitWithSizes", "Unbind", "Expand", "Unsqueeze", "Squeeze", "AsStrided", "Detach",
)  # fmt: skip
_OF_ONE_TENSOR = frozenset(f"{name}Backward{number}" for name in _VIEWS for number in range(3))
"""Operations of autograd that only view, cast or copy."""


class OffloadActivations(Transform):
    """Replaces the model's forward by one that offloads, up to its last block, which the backward needs first.

    Args:
        blocks_of: Returns the names of a model's repeated blocks.
    """

    name = "memory.activation_offload"
    after = ("parallel.ddp.sync_batchnorm", "memory.activation_checkpointing")

    def __init__(self, blocks_of: Callable[[nn.Module], Sequence[str]]) -> None:
        self._blocks_of = blocks_of

    def apply(self, model: nn.Module) -> nn.Module:
        offload = ActivationsOnHost([parameter.shape for parameter in model.parameters()])
        blocks = self._blocks_of(model)
        if len(blocks) > 1:
            model.get_submodule(blocks[-1]).register_forward_pre_hook(partial(_keep_from_here, offload))
        eager: Callable[..., Any] = torch.compiler.disable  # which imports the compiler
        cast("Any", model).forward = partial(eager(_offloaded, recursive=False), model.forward, offload)
        return model


def _offloaded(forward: Callable[..., Any], offload: ActivationsOnHost, *inputs: Any, **named: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*inputs, **named)
    with offload:
        return forward(*inputs, **named)


def _keep_from_here(offload: ActivationsOnHost, module: nn.Module, inputs: object) -> None:
    if not torch.compiler.is_compiling():  # a compiled forward saves everything at its end
        offload.paused = True


class ActivationsOnHost(saved_tensors_hooks):
    """Saves, in this context, autograd's tensors for the backward in the host's memory.

    It can be entered once for each forward, also before the backward of the one before.

    Args:
        shapes: Of the weights; a tensor of such a shape that autograd didn't make is the cast of a frozen one.
        least_bytes: Tensors of less memory stay on the device.

    Attributes:
        bytes: Number of bytes that were copied to the host.
        paused: Whether tensors stay on the device until the context is entered again.
    """

    def __init__(self, shapes: Collection[tuple[int, ...]] = (), least_bytes: int = LEAST_BYTES) -> None:
        super().__init__(self._pack, _unpack)
        self.bytes = 0
        self.paused = False
        self._shapes = {order for shape in shapes for order in (tuple(shape), tuple(reversed(shape))) if len(shape) > 1}
        self._least_bytes = least_bytes
        self._by_storage: weakref.WeakKeyDictionary[Any, tuple[int, weakref.ref[_OnHost]]]
        self._by_storage = weakref.WeakKeyDictionary()

    def __enter__(self) -> None:
        self.paused = False
        super().__enter__()

    def _pack(self, tensor: Tensor) -> object:
        of_weight = _is_of_weight(tensor) or (tensor.grad_fn is None and tuple(tensor.shape) in self._shapes)
        wrapper: Any = tensor
        if self.paused or of_weight or is_traceable_wrapper_subclass(wrapper):
            return _kept(tensor)
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        if tensor.layout is not torch.strided or not self._least_bytes <= size <= _LARGEST_SHARE * tensor.nbytes:
            return _kept(tensor)
        held = self._on_host(tensor, storage)
        held.uses += 1
        return _View(held, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _on_host(self, tensor: Tensor, storage: torch.UntypedStorage) -> _OnHost:
        known = self._by_storage.get(storage)
        if known is not None and known[0] == tensor._version and (earlier := known[1]()) is not None:
            return earlier
        elements = storage.nbytes() // tensor.element_size()
        held = _OnHost(tensor.detach().as_strided((elements,), (1,), 0).view(torch.uint8))
        self._by_storage[storage] = (tensor._version, weakref.ref(held))
        self.bytes += storage.nbytes()
        return held


def _kept(tensor: Tensor) -> Tensor:
    """Return a tensor to be kept: without its node, which would keep itself alive if no backward follows."""
    return tensor if tensor.grad_fn is None else tensor.detach()


class _View(NamedTuple):
    held: _OnHost
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _unpack(kept: Any) -> Tensor:
    if not isinstance(kept, _View):
        return cast("Tensor", kept)
    return kept.held.use().view(kept.dtype).as_strided(kept.size, kept.stride, kept.offset)


class _OnHost:
    """The memory of activations, copied to the host.

    Attributes:
        uses: How many saved tensors are in it and weren't read yet.
    """

    def __init__(self, memory: Tensor) -> None:
        self.uses = 0
        self._device = memory.device
        self._buffer = torch.empty(len(memory), dtype=torch.uint8, pin_memory=memory.device.type != "cpu")
        self._buffer.copy_(memory, non_blocking=True)
        self._returned: Tensor | None = None

    def use(self) -> Tensor:
        """Return the bytes on the device; they are copied back once for all saved tensors."""
        memory = self._buffer.to(self._device, non_blocking=True) if self._returned is None else self._returned
        self.uses -= 1
        self._returned = memory if self.uses > 0 else None
        return memory


def _is_of_weight(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter, a view of one, or a cast of one, which stays on the device anyway."""
    if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
        return True
    node: Any = tensor.grad_fn
    while node is not None and node.name() in _OF_ONE_TENSOR:
        sources = [source for source, _ in node.next_functions if source is not None]
        node = sources[0] if len(sources) == 1 else None
    return node is not None and isinstance(getattr(node, "variable", None), nn.Parameter)
