"""Kernels of the simulated device, and of tensors without data: autocast, fused norms, attention, grouped products.

Autocast has the same operations as torch's for CUDA, by the lists of the page "Automatic Mixed Precision" of torch's
documentation. A cast weight is cached until the outermost context ends, as torch does, if the cache is enabled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

from lockstep.simulation.device import NAME

_LOWER = """
    conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution prelu addmm addmv addr
    matmul einsum mm mv linalg_vecdot linalg_multi_dot linear addbmm baddbmm bmm chain_matmul
    scaled_dot_product_attention
"""
_FP32 = """
    acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow softplus layer_norm
    native_layer_norm group_norm nuclear_norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss
    nll_loss2d hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
    multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits
    dist pdist cdist renorm logsumexp
"""
_FP32_RESULT = "prod softmax log_softmax cumprod cumsum sum"
_PROMOTED = "addcdiv addcmul atan2 bilinear cross dot grid_sampler index_put tensordot scatter_add vdot"

_HALF = (torch.bfloat16, torch.float16)
_casts: Any = WeakIdKeyDictionary()


def clear_cache() -> None:
    """Forget the casts of weights, as torch does at the end of the outermost context."""
    _casts.clear()


@cache
def register() -> tuple[torch.library.Library, ...]:
    """Register the kernels, once in a process; they last as long as the libraries, which the cache keeps."""
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    library = torch.library.Library("aten", "IMPL")
    policies = ((_LOWER, _lower), (_FP32, _fp32), (_FP32_RESULT, _fp32_result), (_PROMOTED, _promoted))
    for names, policy in policies:
        for name in names.split():
            packet = getattr(torch.ops.aten, name)
            for overload in packet.overloads():
                if "out" in overload or "Dimname" in overload or overload in ("dimname",):
                    continue
                operation = getattr(packet, overload)
                library.impl(operation, _kernel(operation, policy), "AutocastPrivateUse1")
    library.impl("_fused_rms_norm", rms_norm, "PrivateUse1")  # as on GPUs
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        library.impl("scaled_dot_product_attention", _attention, key)
    return everything, library


def _kernel(operation: Any, policy: Callable[[Any, Any, Any], tuple[Any, Any]]) -> Callable[..., Any]:
    excluded = torch._C.DispatchKeySet(cast("Any", torch._C.DispatchKey).AutocastPrivateUse1)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(excluded):
            args, kwargs = policy(operation, args, kwargs)
            return operation(*args, **kwargs)

    return kernel


def _lower(operation: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    dtype = torch.get_autocast_dtype(NAME)
    return pytree.tree_map(lambda leaf: _cast(leaf, dtype), (args, kwargs))


def _fp32(operation: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    return pytree.tree_map(lambda leaf: _cast(leaf, torch.float32), (args, kwargs))


def _fp32_result(operation: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    names = [argument.name for argument in operation._schema.arguments]
    if "dtype" in names and isinstance(args[0], Tensor) and args[0].dtype in _HALF and kwargs.get("dtype") is None:
        place = names.index("dtype")
        if place >= len(args):
            return args, {**kwargs, "dtype": torch.float32}
        if args[place] is None:
            return (*args[:place], torch.float32, *args[place + 1 :]), kwargs
    return args, kwargs


def _promoted(operation: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if _is_castable(leaf)]
    wide = torch.float32 if any(tensor.dtype == torch.float32 for tensor in tensors) else None
    return (args, kwargs) if wide is None else pytree.tree_map(lambda leaf: _cast(leaf, wide), (args, kwargs))


def _is_castable(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64


def _cast(leaf: Any, dtype: torch.dtype) -> Any:
    if not _is_castable(leaf) or leaf.dtype == dtype or leaf.device.type != NAME:
        return leaf
    cached = (
        torch.is_autocast_cache_enabled()
        and dtype in _HALF
        and leaf.dtype == torch.float32
        and leaf.requires_grad
        and leaf.is_leaf
        and leaf._base is None
    )
    if not cached:
        return leaf.to(dtype)
    if leaf not in _casts:
        _casts[leaf] = leaf.to(dtype)
    return _casts[leaf]


aten = torch.ops.aten

_SIZED_BY_KERNEL = {aten.mkldnn_rnn_layer.default}  # oneDNN's workspace, which torch takes for empty without data
_WEIGHTS = {aten.native_layer_norm.default: 2, aten.native_group_norm.default: 1}
"""Norms, with the place of their weight: the CPU keeps mean and deviation in its dtype, torch here in the input's."""


def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None) -> tuple[Tensor, Tensor]:
    """Return the result and, in fp32, the inverse roots of mean squares over the last dims, for the backward."""
    dtype = x.dtype if x.dtype is torch.float64 else torch.float32
    inverse = x.new_empty(*x.shape[: x.dim() - len(shape)], *(1 for _ in shape), dtype=dtype)
    return torch.empty_like(x, memory_format=torch.contiguous_format), inverse


def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], without_data: Callable[[Any], Any]) -> Any:
    """Return the result of an operation on tensors without data, as the kernel of their device makes it."""
    if func._schema.name.startswith("aten::_fused_") and not func._schema.returns:  # torch computes no shapes of it
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


def _zeros_on_host(leaf: Any) -> Any:
    if not isinstance(leaf, FakeTensor):
        return leaf
    with _disable_current_modes():
        value: Tensor = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype).zero_()
        return value


_ALIGNMENT = 16  # bytes; the kernel wants strides to be multiples of it


def grouped_product(
    left: Tensor,
    right: Tensor,
    offs: Tensor | None = None,
    bias: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """Return the shape of `torch._grouped_mm` for its arguments."""
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
