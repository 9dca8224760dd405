"""Operations whose results torch makes otherwise where tensors have no data: too many, too few, or of another dtype."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

aten = torch.ops.aten

_SIZED_BY_KERNEL = {aten.mkldnn_rnn_layer.default}  # oneDNN's workspace, which torch takes for empty without data
_WEIGHTS = {aten.native_layer_norm.default: 2, aten.native_group_norm.default: 1}
"""Norms, with the place of their weight: the CPU keeps mean and deviation in its dtype, torch here in the input's."""


@cache
def register() -> torch.library.Library:
    """Register GPUs' fused norm and choice of attention for the simulated device, once in a process.

    What is registered lasts as long as the library that is returned, which the cache keeps.
    """
    library = torch.library.Library("aten", "IMPL")
    library.impl("_fused_rms_norm", rms_norm, "PrivateUse1")
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        library.impl("scaled_dot_product_attention", _attention, key)
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
    """Return whether it is an optimizer's fused kernel: torch has none that computes only shapes."""
    return func._schema.name.startswith("aten::_fused_") and not func._schema.returns


def _zeros_on_host(leaf: Any) -> Any:
    if not isinstance(leaf, FakeTensor):
        return leaf
    with _disable_current_modes():
        value: Tensor = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype).zero_()
        return value


_ALIGNMENT = 16  # bytes of which the kernel wants strides to be multiples


def grouped_product(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the shape of `torch._grouped_mm`, whose arguments these are.

    Raises:
        RuntimeError: The kernel would refuse them.
    """
    if left.dtype != right.dtype:
        raise RuntimeError(f"_grouped_mm expects matrices of one dtype, but got {left.dtype} and {right.dtype}")
    for matrix in (left, right):
        if max(matrix.stride()[-2:]) * matrix.element_size() % _ALIGNMENT:
            raise RuntimeError(f"_grouped_mm expects strides of a multiple of 16 bytes, but got {matrix.stride()}")
    if left.dim() == right.dim() == 2:
        assert offs is not None, "two matrices are divided into groups"
        shape = [len(offs), left.shape[0], right.shape[1]]
    elif left.dim() == 2:
        shape = [left.shape[0], right.shape[2]]
    elif right.dim() == 2:
        shape = [left.shape[1], right.shape[1]]
    else:
        shape = [left.shape[0], left.shape[1], right.shape[2]]
    return torch.empty(shape, dtype=out_dtype or left.dtype, device=left.device)


# --- attention: the kernel that torch would take on a GPU ---


_HALF = (torch.bfloat16, torch.float16)
_FLASH_DIM = 256  # the largest head of flash attention


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    if query.dim() != 4:
        return aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )[0]
    if enable_gqa and key.shape[1] != query.shape[1]:
        repeats = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    if attn_mask is None and query.dtype in _HALF and query.shape[-1] <= _FLASH_DIM:
        scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
        return aten._scaled_dot_product_flash_attention(query, key, value, dropout_p, is_causal, scale=scale)[0]
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, -math.inf)
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    wants_gradient = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (query, key, value))
    return aten._scaled_dot_product_efficient_attention(
        query, key, value, attn_mask, wants_gradient, dropout_p, is_causal, scale=scale
    )[0]
