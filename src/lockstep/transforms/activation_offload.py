"""Activation offload: activations are kept in the host's memory until the backward needs them.

forward     compute    block 1    | block 2    | block 3, the last, keeps its activations
            copies                | 1 --> host | 2 --> host
backward    compute    block 3    | block 2    | block 1
            copies     host --> 2 | host --> 1 |

Copies run on a stream of their own, with page-locked memory that is used again. What several operations save is copied
once. With activation checkpointing, blocks' inputs are copied. On the device stay activations that are computed again,
weights, their views and casts, DTensors, and small tensors.
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
_IN_FLIGHT = 4  # copies to the host whose memory on the device isn't free yet; and copies back ahead of the backward
_LARGEST_SHARE = 4  # a tensor that is less than this part of its memory is not worth all of it
_VIEWS = [
    "ToCopy",
    "T",
    "Transpose",
    "View",
    "UnsafeView",
    "ReshapeAlias",
    "Permute",
    "Alias",
    "Clone",
    "Select",
    "Slice",
    "Split",
    "SplitWithSizes",
    "Unbind",
    "Expand",
    "Unsqueeze",
    "Squeeze",
    "AsStrided",
    "Detach",
]
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

    def refuses(self, model: nn.Module, device: torch.device) -> str | None:
        return None  # the plan refuses it without accelerators

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
    """A context in which tensors that autograd saves for the backward are saved in the host's memory.

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
        self._copies: dict[torch.device, Copies] = {}
        self._order: list[weakref.ref[_Offloaded]] = []
        self._by_storage: weakref.WeakKeyDictionary[Any, tuple[int, weakref.ref[_Offloaded]]]
        self._by_storage = weakref.WeakKeyDictionary()

    def __enter__(self) -> None:
        self.paused = False
        self._order = []
        for copies in self._copies.values():
            copies.release_sent()
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
        offloaded = self._offload(tensor, storage)
        offloaded.uses += 1
        return _View(offloaded, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def _offload(self, tensor: Tensor, storage: torch.UntypedStorage) -> _Offloaded:
        """Return the memory that was offloaded before with the same content, or start its copy."""
        known = self._by_storage.get(storage)
        if known is not None and known[0] == tensor._version and (earlier := known[1]()) is not None:
            return earlier
        copies = self._copies.get(tensor.device)
        if copies is None:
            copies = self._copies[tensor.device] = Copies(tensor.device)
        elements = storage.nbytes() // tensor.element_size()
        memory = tensor.detach().as_strided((elements,), (1,), 0).view(torch.uint8)
        offloaded = _Offloaded(copies, memory, self._order)
        reference = weakref.ref(offloaded)
        self._order.append(reference)
        self._by_storage[storage] = (tensor._version, reference)
        self.bytes += storage.nbytes()
        return offloaded


def _kept(tensor: Tensor) -> Tensor:
    """Return a tensor to be kept: without its node, which would keep itself alive if no backward follows."""
    return tensor if tensor.grad_fn is None else tensor.detach()


class _View(NamedTuple):
    """A tensor in offloaded memory."""

    offloaded: _Offloaded
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def _unpack(kept: Any) -> Tensor:
    if not isinstance(kept, _View):
        return cast("Tensor", kept)
    return kept.offloaded.use().view(kept.dtype).as_strided(kept.size, kept.stride, kept.offset)


class _Offloaded:
    """The memory of activations, in the host's memory or on its way.

    Attributes:
        uses: How many saved tensors are in it and weren't read yet.
    """

    def __init__(self, copies: Copies, memory: Tensor, order: list[weakref.ref[_Offloaded]]) -> None:
        self.uses = 0
        self._copies = copies
        self._order = order
        self._place = len(order)
        self._buffer = copies.send(memory)
        self._arriving: Arriving | None = None
        weakref.finalize(self, copies.give_back, self._buffer).atexit = False

    def use(self) -> Tensor:
        """Return the bytes on the device, after those that the backward will need next were sent for."""
        self._fetch()
        for reference in reversed(self._order[max(0, self._place - _IN_FLIGHT) : self._place]):
            if (earlier := reference()) is not None and earlier.uses:
                earlier._fetch()
        assert self._arriving is not None
        self._arriving.wait()
        memory = self._arriving.memory
        self.uses -= 1
        if self.uses <= 0:
            self._arriving = None
            self._copies.release(self._buffer)
        return memory

    def _fetch(self) -> None:
        if self._arriving is None:
            self._arriving = self._copies.fetch(self._buffer)


class Arriving:
    """Bytes on their way to the device. The computation waits for them before it uses or frees their memory."""

    def __init__(self, memory: Tensor, wait: Callable[[], None]) -> None:
        self.memory = memory
        self._wait = weakref.finalize(self, wait)
        self._wait.atexit = False

    def wait(self) -> None:
        self._wait()  # once


class Copies:
    """Copies between a device and page-locked buffers, on a stream of their own.

    A buffer may be used again at once, since the stream's copies come one after the other.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream: Any = None if self._module is None else self._module.Stream(device)
        self._free: dict[int, list[Tensor]] = {}
        self._sent: dict[int, tuple[Tensor, Any]] = {}  # by id of the buffer: memory on the device, event

    def send(self, memory: Tensor) -> Tensor:
        """Start a copy of these bytes to the host; return the buffer. Their memory is free a few copies later."""
        buffer = self._buffer(len(memory))
        if self._module is None:
            buffer.copy_(memory)
            return buffer
        compute = self._module.current_stream(self._device)
        self._stream.wait_stream(compute)
        with self._module.stream(self._stream):
            buffer.copy_(memory, non_blocking=True)
            event = self._stream.record_event()
        self._sent[id(buffer)] = memory, event
        if len(self._sent) > _IN_FLIGHT:
            self._free_memory(next(iter(self._sent)))
        return buffer

    def release_sent(self) -> None:
        """Free the memory of all that was sent."""
        for key in list(self._sent):
            self._free_memory(key)

    def release(self, buffer: Tensor) -> None:
        """Free the memory of what was sent to this buffer."""
        if id(buffer) in self._sent:
            self._free_memory(id(buffer))

    def fetch(self, buffer: Tensor) -> Arriving:
        """Start the copy back, unless the memory is still there."""
        if id(buffer) in self._sent:
            return Arriving(self._sent[id(buffer)][0], _nothing)
        if self._module is None:
            return Arriving(buffer.clone(), _nothing)
        compute = self._module.current_stream(self._device)
        memory = torch.empty(len(buffer), dtype=torch.uint8, device=self._device)
        self._stream.wait_stream(compute)  # which may still use what was there before
        with self._module.stream(self._stream):
            memory.copy_(buffer, non_blocking=True)
            event = self._stream.record_event()
        return Arriving(memory, lambda: event.wait(self._module.current_stream(self._device)))

    def give_back(self, buffer: Tensor) -> None:
        """Use the buffer for other copies from now on."""
        self.release(buffer)
        self._free.setdefault(len(buffer), []).append(buffer)

    def _free_memory(self, key: int) -> None:
        """Free memory once it is copied: what the computation does next with it comes after the copy."""
        _, event = self._sent.pop(key)
        event.wait(self._module.current_stream(self._device))

    def _buffer(self, size: int) -> Tensor:
        free = self._free.get(size)
        return free.pop() if free else torch.empty(size, dtype=torch.uint8, pin_memory=self._module is not None)


def _nothing() -> None:
    pass


def _is_of_weight(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter, a view of one, or a cast of one, which stays on the device anyway."""
    if isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter):
        return True
    node: Any = tensor.grad_fn
    while node is not None and node.name() in _OF_ONE_TENSOR:
        sources = [source for source, _ in node.next_functions if source is not None]
        node = sources[0] if len(sources) == 1 else None
    return node is not None and isinstance(getattr(node, "variable", None), nn.Parameter)
