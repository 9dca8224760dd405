"""Operations whose results torch makes otherwise where tensors have no data: too many, too few, or of another dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from lockstep.simulation.grouped_products import grouped_product

aten = torch.ops.aten

_SIZED_BY_KERNEL = {aten.mkldnn_rnn_layer.default}  # oneDNN's workspace, which torch takes for empty without data
_WEIGHTS = {aten.native_layer_norm.default: 2, aten.native_group_norm.default: 1}
"""Norms, with the place of their weight: the CPU keeps mean and deviation in its dtype, torch here in the input's."""


@cache
def register() -> torch.library.Library:
    """Register, once in a process, that the simulated device has the fused norm that GPUs have.

    What is registered lasts as long as the library that is returned, which the cache keeps.
    """
    library = torch.library.Library("aten", "IMPL")
    library.impl("_fused_rms_norm", rms_norm, "PrivateUse1")
    return library


def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    """Return the result and, in fp32, the inverse roots of mean squares over the last dims, for the backward."""
    dtype = x.dtype if x.dtype is torch.float64 else torch.float32
    inverse = x.new_empty(*x.shape[: x.dim() - len(shape)], *(1 for _ in shape), dtype=dtype)
    return torch.empty_like(x, memory_format=torch.contiguous_format), inverse


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], without_data: Callable[[Any], Any]) -> Any:
    """Return the result of an operation on tensors without data, as the kernel of their device makes it.

    Args:
        without_data: Makes a tensor without data of one on the CPU.
    """
    if _is_fused_update(func):
        return None
    if func is aten._grouped_mm.default:
        return grouped_product(*args, **kwargs)
    if func is aten._fused_rms_norm.default:
        return rms_norm(*args, **kwargs)
    if func in _SIZED_BY_KERNEL:
        return _sized(func, args, kwargs, without_data)
    result = func(*args, **kwargs)
    if func in _WEIGHTS and args[0].device.type == "cpu" and (weight := args[_WEIGHTS[func]]) is not None:
        return result[0], *(statistic.to(weight.dtype) for statistic in result[1:])
    return result


def _sized(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], without_data: Callable[[Any], Any]) -> Any:
    values, named = pytree.tree_map(_zeros_on_host, (args, kwargs))
    with _disable_current_modes():
        results = func(*values, **named)
    return pytree.tree_map(without_data, results)


def _is_fused_update(func: Any) -> bool:
    """Return whether it is a fused kernel of an optimizer, of which torch has none that computes shapes alone."""
    return func._schema.name.startswith("aten::_fused_") and not func._schema.returns


def _zeros_on_host(leaf: Any) -> Any:
    if not isinstance(leaf, FakeTensor):
        return leaf
    with _disable_current_modes():
        value: Tensor = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype).zero_()
        return value
