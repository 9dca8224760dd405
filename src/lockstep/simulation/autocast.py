"""Autocast for the simulated device: the same operations as torch's autocast for CUDA, cast in the same way.

    lower precision   matrix products, convolutions, attention: floating-point arguments in the autocast dtype
    fp32              exponentials, norms, losses: arguments in fp32
    fp32 results      sums and softmax: their result in fp32
    promoted          several arguments: in the widest of their dtypes

The lists are those of the page "Automatic Mixed Precision" of torch's documentation. A weight that is cast is kept in a
cache until the outermost context ends, as torch does, if the context's cache is enabled.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
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
    takes_dtype = any(argument.name == "dtype" for argument in operation._schema.arguments)
    if takes_dtype and isinstance(args[0], Tensor) and args[0].dtype in _HALF and kwargs.get("dtype") is None:
        given = {argument.name for argument in operation._schema.arguments[: len(args)]}
        if "dtype" not in given:
            return args, {**kwargs, "dtype": torch.float32}
        place = [argument.name for argument in operation._schema.arguments].index("dtype")
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
