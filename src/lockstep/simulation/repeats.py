"""Outputs of operations on tensors without data, made again where an operation has had inputs of the same shapes.

torch's FakeTensorMode finds out the first time; the blocks of a model, and the updates of a run, then repeat it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

aten = torch.ops.aten

_MOST = 200_000  # remembered operations
_VALUES = (torch.dtype, torch.device, torch.layout, torch.memory_format, str, type(None))
_NAMESPACES = ("aten", "fsdp")
_UNREPEATABLE = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view}
_CHANGES_ITS_INPUT = ("set_", "resize_", "resize_as_", "set_data", "lift", "lift_fresh", "lift_fresh_copy", "rename_")

Key = tuple[object, ...]


class Call(NamedTuple):
    """An operation that has run; `facts` holds what else is found out about it, for all calls with these shapes."""

    func: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outputs: Sequence[Tensor]
    facts: dict[str, Any]


def tensors_in(values: Any) -> list[Tensor]:
    """Return the tensors in arguments or results of an operation, in order."""
    if isinstance(values, Tensor):
        return [values]
    return [tensor for value in values for tensor in tensors_in(value)] if isinstance(values, list | tuple) else []


@dataclass(frozen=True, slots=True)
class _Output:
    """The origin of an output: argument `same` itself, or a new tensor, perhaps in `view_of`'s storage."""

    same: int | None = None
    view_of: int | None = None
    shape: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    offset: int = 0
    dtype: torch.dtype = torch.float32
    device: torch.device | None = None
    state: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Repeat:
    """The outputs of an operation, to be made again.

    Attributes:
        is_small: Whether all inputs and outputs may have values.
        facts: What else follows from the operation and its arguments' shapes.
    """

    outputs: tuple[_Output | None, ...]
    container: type | None
    is_small: bool
    facts: dict[str, Any] = field(default_factory=dict)

    def make(self, args: tuple[Any, ...], mode: FakeTensorMode) -> tuple[Any, list[Tensor]]:
        """Return the result for these arguments, and the tensors in it."""
        made = [None if output is None else _made(output, args, mode) for output in self.outputs]
        tensors: list[Tensor] = [tensor for tensor in made if tensor is not None]
        if self.container is None:
            return (made[0] if made else None), tensors
        return self.container(made), tensors


_known: dict[Key, Repeat] = {}


def key_of(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Key | None:
    """Return what an operation's result depends on; None if that isn't known."""
    parts: list[object] = [func, torch.get_default_dtype()]
    is_known = _add(parts, args) and all(_add(parts, item) for item in kwargs.items())
    return tuple(parts) if is_known else None


def _add(parts: list[object], values: Sequence[object]) -> bool:
    for value in values:
        if isinstance(value, FakeTensor):
            if value.constant is not None or value.dtype.is_complex or value.layout is not torch.strided:
                return False
            parts += (value.shape, value.stride(), value.storage_offset(), value.dtype, value.fake_device)
            parts.append(value.untyped_storage().nbytes())  # FSDP frees storages; their views are refused
        elif isinstance(value, bool | int | float):
            parts += (type(value), value)
        elif isinstance(value, list | tuple):
            parts.append(len(value))
            if not _add(parts, value):
                return False
        elif isinstance(value, _VALUES):
            parts.append(value)
        else:
            return False
    return True


def known(key: Key) -> Repeat | None:
    """Return how the result of an operation is made; None if it hasn't run yet, or can't be repeated."""
    return _known.get(key)


def remember(
    key: Key,
    func: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    result: Any,
    is_small: Callable[[Tensor], bool],
) -> None:
    """Record how the result of an operation was made, if it can be repeated."""
    if func.namespace not in _NAMESPACES or not _UNREPEATABLE.isdisjoint(func.tags):
        return
    if torch.is_inference_mode_enabled() or func._schema.name.partition("::")[2] in _CHANGES_ITS_INPUT:
        return
    container = type(result) if type(result) in (list, tuple) else None
    values = result if container is not None else [] if result is None else [result]
    inputs = [tensor for tensor in tensors_in([args, *kwargs.values()]) if isinstance(tensor, FakeTensor)]
    outputs = tuple(None if value is None else _output_of(value, args, inputs) for value in values)
    if any(output is None and value is not None for output, value in zip(outputs, values, strict=True)):
        return
    small = all(map(is_small, (*inputs, *(value for value in values if value is not None))))
    if len(_known) >= _MOST:
        _known.clear()
    _known[key] = Repeat(outputs, container, small)


def _output_of(value: Any, args: tuple[Any, ...], inputs: Sequence[FakeTensor]) -> _Output | None:
    same = next((index for index, argument in enumerate(args) if argument is value), None)
    if same is not None:
        return _Output(same=same)
    if type(value) is not FakeTensor or value.layout is not torch.strided or value.dtype.is_complex:
        return None
    if value.requires_grad or value.constant is not None or value.is_neg():
        return None
    storage = value.untyped_storage()._cdata
    view_of: int | None = None
    if any(storage == tensor.untyped_storage()._cdata for tensor in inputs):
        owners = [i for i, argument in enumerate(args) if isinstance(argument, FakeTensor)]
        owners = [index for index in owners if args[index].untyped_storage()._cdata == storage]
        if len(owners) != 1:
            return None
        view_of = owners[0]
    output = _Output(
        view_of=view_of,
        shape=tuple(value.shape),
        stride=value.stride(),
        offset=int(value.storage_offset()),
        dtype=value.dtype,
        device=value.fake_device,
        state={name: held for name, held in value.__dict__.items() if name != "fake_mode"},
    )
    again = _made(output, args, value.fake_mode)
    is_alike = (
        again.__dict__ == value.__dict__
        and torch._C._dispatch_key_set(again) == torch._C._dispatch_key_set(value)
        and again.untyped_storage().nbytes() == value.untyped_storage().nbytes()
    )
    return output if is_alike else None


def _made(output: _Output, args: tuple[Any, ...], mode: FakeTensorMode) -> FakeTensor:
    if output.same is not None:
        return cast("FakeTensor", args[output.same])
    with torch._C._DisableTorchDispatch():
        if output.view_of is None:
            shape_alone = torch.empty_strided(output.shape, output.stride, dtype=output.dtype, device="meta")
        else:
            shape_alone = torch.empty((0,), dtype=output.dtype, device="meta")
            shape_alone.set_(args[output.view_of].untyped_storage(), output.offset, output.shape, output.stride)
    made: Any = Tensor._make_subclass(  # as FakeTensor.__new__ does, without its checks, which take as long as the rest
        FakeTensor, shape_alone, False, dispatch_device=True, device_for_backend_keys=output.device
    )
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
    else:
        torch._C._set_throw_on_mutable_data_ptr(made)
    made.__dict__.update(output.state)
    made.fake_mode = mode
    return made
