"""How operations run on the simulated device: shapes for all tensors, values for small ones.

only on the CPU               as always; a new tensor of over a million elements has only a shape (if the CPU is what
                              is simulated, every new tensor)
on the device                 shapes, by torch's FakeTensorMode; a tensor of another device is an error
small results                 and values, computed from the values of small inputs; what depends on large tensors,
                              such as the loss, is 1
a value that the host reads   a host sync, which is recorded
"""

from __future__ import annotations

import copyreg
import math
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass_type
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.simulation import device, kernels, repeats
from lockstep.simulation.failing import is_users, place
from lockstep.simulation.repeats import Call, tensors_in

aten, prim = torch.ops.aten, torch.ops.prim

_SMALL = 256  # elements; a tensor on the device with more has no values
_SMALL_INT32 = 1 << 16  # the same of an int32: DDP's C++ sends the order of its buckets through the device
_LARGE = 1 << 20  # elements; a new tensor on the CPU with as many has none
_SMALL_ON_CPU = 17  # the same where the CPU is what is simulated; scales and counters have values
_FACTORIES = {
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.zeros.default,
    aten.ones.default,
    aten.full.default,
    aten.rand.default,
    aten.randn.default,
}
_READS = {aten._local_scalar_dense.default, aten.copy_.default, aten._to_copy.default}
_HERE = str(Path(__file__).parent)
_PACKAGE = str(Path(__file__).parents[1])
_ABSENT = object()  # a slot without a value
_FRAMES = 3  # of the product that a location names


@dataclass(frozen=True, slots=True)
class HostSync:
    """A point where the host waits: what waits, and the innermost functions there, user code first."""

    operation: str
    location: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.operation} in {' < '.join(self.location)}"


class Execution(TorchDispatchMode):
    """Runs operations while it is active.

    Attributes:
        mode: Computes shapes.
        syncs: The host's waits, in order.
        page_locked: The page-locked memory that saves have allocated: bytes, and the thread.
        watchers: Called after each operation that has a tensor without data.
    """

    def __init__(self, place: str, mode: FakeTensorMode) -> None:
        super().__init__()
        self._place = place
        self.mode = mode
        self._large = _SMALL_ON_CPU if place == "cpu" else _LARGE
        self.syncs: list[HostSync] = []
        self.page_locked: list[tuple[int, str]] = []
        self.watchers: list[Callable[[Call], None]] = []
        self._values: Any = WeakIdKeyDictionary()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's guard against its compiler takes as long as a small operation

    def note_sync(self, operation: str) -> None:
        """Record that the host waits here."""
        self.syncs.append(HostSync(operation, _location()))

    def lock_pages(self, size: int) -> Tensor:
        """Return memory of the host that counts as page-locked; in any thread."""
        self.page_locked.append((size, threading.current_thread().name))
        with _disable_current_modes():
            return torch.empty(size, dtype=torch.uint8)

    def copy(self, copies: Iterable[Any]) -> None:
        """Copy to the image of a file; in any thread, which may not have this mode."""
        with _disable_current_modes(), torch.no_grad():
            for target, source, where in copies:
                target.copy_(self.value_of(source)[() if where is None else where])

    def value_of(self, tensor: Tensor) -> Tensor:
        """Return the value of a small tensor; ones for another."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        value = self._values.get(tensor)
        if value is None:
            with _disable_current_modes():
                value = torch.ones(tensor.shape, dtype=tensor.dtype)
            if _is_small(tensor):
                self._values[tensor] = value
        return value

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is prim.device.default:
            return args[0].device
        if func.namespace in ("prim", "c10d"):  # collectives, which `SimulatedGroup` gets
            return func(*args, **(kwargs or {}))
        has_wrapper, has_fake = _kinds(tuple(types))
        if has_wrapper:  # a DTensor: it computes with those inside
            return NotImplemented
        kwargs = dict(kwargs or {})
        kwargs.pop("pin_memory", None)
        if func is aten._pin_memory.default:
            return args[0]
        if func is aten.is_pinned.default:
            return True
        if not has_fake and not self._makes_shape(func, args, kwargs):
            with _disable_current_modes():
                result = func(*args, **kwargs)
            if self._place == "cpu":
                self._show(Call(func, args, kwargs, tensors_in(result), {}))
            return result
        read = self._read(func, args, kwargs) if func in _READS else None
        if read is not None:
            return read[0]
        return self._run(func, args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        key = repeats.key_of(func, args, kwargs)
        repeat = None if key is None else repeats.known(key)
        if repeat is not None:
            result, outputs = repeat.make(args, self.mode)
        else:
            args, kwargs = pytree.tree_map(self._without_data, (args, kwargs))
            result = kernels.run(func, args, kwargs, self._without_data)
            outputs = tensors_in(result)
            if key is not None:
                repeats.remember(key, func, args, kwargs, result, _is_small)
        if repeat is None or repeat.is_small:
            self._compute(func, args, kwargs, [output for output in outputs if isinstance(output, FakeTensor)])
        else:
            self._forget_values(outputs)
        self._show(Call(func, args, kwargs, outputs, {} if repeat is None else repeat.facts))
        return result

    def _show(self, call: Call) -> None:
        for watcher in self.watchers:
            watcher(call)

    def _makes_shape(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        place = torch.device(kwargs.get("device") or "cpu").type
        if place == device.NAME:
            return True
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        if self._place == "cpu" and not (dtype.is_floating_point or dtype is torch.uint8):  # FSDP's buffer of bytes
            return False  # indices, which DDP's C++ reads
        return func in _FACTORIES and place == "cpu" and math.prod(args[0]) >= self._large

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any] | None:
        """Return, in a tuple, what the host gets if it reads a tensor without data; None for other operations."""
        if func is aten._local_scalar_dense.default:
            source, waits, operation = args[0], True, "item"
        elif func is aten.copy_.default and args[0].device.type == "cpu":
            source, waits, operation = args[1], not _argument(func, args, kwargs, "non_blocking"), "copy to the host"
        elif func is aten._to_copy.default and str(kwargs.get("device") or "") == "cpu":
            source, waits, operation = args[0], not kwargs.get("non_blocking"), "copy to the host"
        else:
            return None
        if waits and source.device.type == self._place != "cpu":
            self.note_sync(operation)
        target = args[0] if func is aten.copy_.default else None
        if isinstance(target, FakeTensor) or (target is None and not _is_small(source)):
            return None
        value = self.value_of(source)
        with _disable_current_modes():
            if self._place == "cpu" and not value.isfinite().all():  # of memory that nothing has written
                value = torch.ones_like(value)
            return (func(value, **kwargs) if target is None else target.copy_(value),)

    def _without_data(self, leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or isinstance(leaf, FakeTensor):
            return leaf
        shape = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
        if _is_small(leaf):
            with _disable_current_modes():
                self._values[shape] = leaf.detach()
        return shape

    def _compute(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], outputs: Sequence[Tensor]) -> None:
        inputs = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)]
        if all(map(_is_small, (*inputs, *outputs))):
            values, named = pytree.tree_map(self._on_host, (args, kwargs))
            try:
                with _disable_current_modes():
                    results = func(*values, **named)
            except (RuntimeError, NotImplementedError):  # an operation only of accelerators
                results = None
            computed = [leaf for leaf in pytree.tree_leaves(results) if isinstance(leaf, Tensor)]
            if len(computed) == len(outputs):
                for output, value in zip(outputs, computed, strict=True):
                    self._values[output] = value
                return
        self._forget_values(outputs)

    def _forget_values(self, outputs: Sequence[Tensor]) -> None:
        """Drop the values of outputs that an operation without values changed in place: they read as ones."""
        for output in outputs:
            if _is_small(output) and output in self._values:
                with _disable_current_modes():
                    self._values[output].fill_(1)

    def set_data(self, tensor: Tensor, value: Tensor) -> None:
        """Set the data of a tensor; torch moves it between CPU and GPU so, but not to a device of a Python backend."""
        if tensor.device == value.device and isinstance(tensor, FakeTensor) != isinstance(value, FakeTensor):
            # DeepSpeed frees parameters by an empty tensor of the CPU; the smallest parameters there have values
            value = self.mode.from_tensor(value) if isinstance(tensor, FakeTensor) else self.value_of(value)
        if not isinstance(value, FakeTensor) or tensor.device == value.device:
            _DATA.__set__(tensor, value)
            return
        with torch.no_grad():
            moved = value.detach()
            is_parameter = isinstance(tensor, nn.Parameter)
            _swap(tensor, nn.Parameter(moved, requires_grad=tensor.requires_grad) if is_parameter else moved)

    def _on_host(self, leaf: Any) -> Any:
        if isinstance(leaf, FakeTensor):
            return self.value_of(leaf)
        return torch.device("cpu") if isinstance(leaf, torch.device) and leaf.type in (device.NAME, "meta") else leaf


@contextmanager
def simulated_execution(place: str = device.NAME) -> Iterator[Execution]:
    """Run what the block does with tensors on the simulated device without data.

    Process groups are made before it. Backwards run on this thread, since others don't have the mode.

    Args:
        place: The type of the device; `cpu`: tensors of the CPU have no data either, except datasets'.
    """
    module = device.register()
    kernels.register()
    execution = Execution(place, FakeTensorMode(allow_non_fake_inputs=True))
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ))  # DeepSpeed sets LOCAL_RANK, and others recognize a rank by it
        for target, replacement in _replacements(execution):
            stack.enter_context(patch(target, replacement))
        stack.enter_context(patch.object(Tensor, "data", property(_data, execution.set_data)))
        stack.enter_context(patch.object(Tensor, "record_stream", lambda tensor, stream: None))
        stack.enter_context(patch.object(Tensor, "as_subclass", _as_subclass))
        stack.enter_context(patch.object(torch.autograd.Variable, "_execution_engine", device.RaisingEngine()))
        numpy = Tensor.numpy
        stack.enter_context(
            patch.object(Tensor, "numpy", lambda tensor, **named: numpy(execution.value_of(tensor), **named))
        )
        swaps = torch.__future__.get_swap_module_params_on_conversion()
        torch.__future__.set_swap_module_params_on_conversion(True)  # a moved parameter stays shared, as on a GPU
        stack.callback(torch.__future__.set_swap_module_params_on_conversion, swaps)
        lifts = torch._C._only_lift_cpu_tensors()
        torch._C._set_only_lift_cpu_tensors(True)  # or torch.tensor(..., device=...) bypasses the mode
        stack.callback(torch._C._set_only_lift_cpu_tensors, lifts)
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        module.on_wait, module.active = execution.note_sync, place != "cpu"
        stack.callback(setattr, module, "on_wait", None)
        stack.callback(setattr, module, "active", False)
        stack.enter_context(execution.mode)
        yield stack.enter_context(execution)


@cache
def _kinds(types: tuple[type, ...]) -> tuple[bool, bool]:
    """Return whether one of the types wraps tensors, and whether one has no data."""
    wraps = any(is_traceable_wrapper_subclass_type(kind) for kind in types)
    return wraps, any(issubclass(kind, FakeTensor) for kind in types)


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() <= (_SMALL_INT32 if tensor.dtype is torch.int32 else _SMALL)


def _replacements(execution: Execution) -> list[tuple[str, Any]]:
    clear = torch.clear_autocast_cache

    def clear_both() -> None:
        clear()
        kernels.clear_cache()

    return [
        ("torch.clear_autocast_cache", clear_both),
        ("torch.accelerator.current_stream", device.register().current_stream),  # torch's is one of C++
        ("lockstep.checkpoint.snapshot.page_locked", execution.lock_pages),
        ("lockstep.checkpoint.snapshot.copy", execution.copy),
        ("torch.utils.swap_tensors", _swap),  # torch's refuses tensors with weak references, which these have
        # makes a view for each rank of each parameter
        ("torch.distributed.fsdp._fully_shard._fsdp_param._chunk_with_empty", _Chunks),
        # compares shapes over ranks by reading memory in C++
        ("torch.nn.parallel.distributed._verify_param_shape_across_processes", lambda *unused: None),
    ]


class _Chunks:
    """The chunks of a tensor as `torch.chunk` makes them, and empty ones after them; each is made when it is read."""

    def __init__(self, tensor: Tensor, number: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._size = -(-tensor.size(dim) // number)

    def __getitem__(self, index: int) -> Tensor:
        start = index * self._size
        rest = self._tensor.size(self._dim) - start
        if rest <= 0 < self._size:
            return self[0].new_empty(0)
        return self._tensor.narrow(self._dim, start, min(self._size, rest))


def _argument(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> Any:
    place = [argument.name for argument in func._schema.arguments].index(name)
    return args[place] if place < len(args) else kwargs.get(name)


def _location() -> tuple[str, ...]:
    frames: list[str] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(frames) < _FRAMES:
        code = frame.f_code
        if code.co_filename.startswith(_PACKAGE):
            if not code.co_filename.startswith(_HERE):
                frames.append(f"{Path(code.co_filename).name}:{code.co_name}")
        elif not frames and is_users(code.co_filename):
            frames.append(place(code, frame.f_lineno))
        frame = frame.f_back
    return tuple(frames)


def _swap(first: Any, second: Any) -> None:
    first.__class__, second.__class__ = second.__class__, first.__class__
    first.__dict__, second.__dict__ = second.__dict__, first.__dict__
    for slot in {*copyreg._slotnames(type(first)), *copyreg._slotnames(type(second))}:  # type: ignore[attr-defined]
        values = [(each, getattr(each, slot, _ABSENT)) for each in (first, second)]
        present = [(holder, value) for holder, value in values if value is not _ABSENT]
        for holder, _ in present:
            delattr(holder, slot)
        for holder, value in present:
            setattr(second if holder is first else first, slot, value)
    torch._C._swap_tensor_impl(first, second)


_AS_SUBCLASS: Any = torch._C.TensorBase.as_subclass


def _as_subclass(tensor: Tensor, subclass: type[Tensor]) -> Tensor:
    if not isinstance(tensor, FakeTensor):
        return cast("Tensor", _AS_SUBCLASS(tensor, subclass))
    made = tensor.detach()
    made.__class__ = subclass if issubclass(subclass, FakeTensor) else _without_data_of(subclass)
    return made


@cache
def _without_data_of(subclass: type[Tensor]) -> type[FakeTensor]:
    return cast("type[FakeTensor]", type(subclass.__name__, (subclass, FakeTensor), {}))


_DATA: Any = torch._C.TensorBase.data


def _data(tensor: Tensor) -> Tensor:
    return _DATA.__get__(tensor)
