"""Attention on the simulated device: the kernel that torch would take on a GPU.

half precision, no mask     flash attention: keeps its output and a number for each query
with a mask, or in fp32     memory-efficient attention: the same
otherwise                   matrix products, which keep all scores
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten

_HALF = (torch.bfloat16, torch.float16)
_FLASH_DIM = 256  # the largest head of flash attention


@cache
def register() -> torch.library.Library:
    """Register the choice, once in a process; it lasts as long as the library, which the cache keeps."""
    library = torch.library.Library("aten", "IMPL")
    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        library.impl("scaled_dot_product_attention", _attention, key)
    return library


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
