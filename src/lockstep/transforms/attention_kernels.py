"""Attention of some queries to some keys, with sums to merge it with attention to other keys.

q [B, H, Q, D]; k, v [B, H, K, D]; lse [B, H, Q] fp32, fp64 of fp64. A mask [B, 1, Q, K] is added to the scores.
(Dao 2023, FlashAttention-2, arXiv:2307.08691, section 3.1.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)
_flash_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
_flash = torch.ops.aten._scaled_dot_product_flash_attention
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward


class AttentionOutput(NamedTuple):
    """Attention to some keys.

    Attributes:
        values: softmax(q k' scale + mask) v, in q's dtype.
        lse: Log of the softmax's divisors.
    """

    values: Tensor
    lse: Tensor


class AttentionGradients(NamedTuple):
    """Gradients of q, k and v, in their dtypes."""

    query: Tensor
    key: Tensor
    value: Tensor


@dataclass(frozen=True, slots=True)
class Visibility:
    """The keys that a query sees, and the scale of scores.

    Attributes:
        causal: Whether query i sees keys up to i; there is no mask then.
    """

    scale: float
    causal: bool = False
    mask: Tensor | None = None


def attend(query: Tensor, key: Tensor, value: Tensor, visibility: Visibility) -> AttentionOutput:
    """Return attention; no gradient is recorded."""
    if query.device.type == "cpu":
        options = {"attn_mask": visibility.mask, "scale": visibility.scale}
        return AttentionOutput(*_flash_cpu(query, key, value, 0.0, visibility.causal, **options)[:2])
    if _has_flash(query, visibility):
        return AttentionOutput(*_flash(query, key, value, 0.0, visibility.causal, scale=visibility.scale)[:2])
    return attend_by_formula(query, key, value, visibility)


def attend_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: AttentionOutput, visibility: Visibility
) -> AttentionGradients:
    """Return the gradients of attention.

    Args:
        gradient: The gradient of the output's values, [B, H, Q, D].
        output: Attention to all keys that the queries see, not only these.
    """
    if query.device.type == "cpu":
        results = _flash_cpu_backward(
            gradient, query, key, value, output.values, output.lse, 0.0, visibility.causal,
            attn_mask=visibility.mask, scale=visibility.scale,
        )  # fmt: skip
        return AttentionGradients(*results)
    if _has_flash(query, visibility):
        none = torch.empty(0, device=query.device, dtype=torch.uint64)
        results = _flash_backward(
            gradient, query, key, value, output.values, output.lse, None, None, query.shape[2], key.shape[2], 0.0,
            visibility.causal, none, none, scale=visibility.scale,
        )  # fmt: skip
        return AttentionGradients(*results)
    return attend_by_formula_backward(gradient, query, key, value, output, visibility)


def attend_by_formula(query: Tensor, key: Tensor, value: Tensor, visibility: Visibility) -> AttentionOutput:
    """Return `attend`'s result by the formula, in fp32 or better: all scores exist at once."""
    scores = _scores(query, key, visibility)
    lse = torch.logsumexp(scores, dim=-1)
    values = torch.exp(scores - lse[..., None]) @ value.to(scores.dtype)
    return AttentionOutput(values.to(query.dtype), lse)


def attend_by_formula_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, output: AttentionOutput, visibility: Visibility
) -> AttentionGradients:
    """Return `attend_backward`'s result by the formula."""
    scores = _scores(query, key, visibility)
    wide, shares = gradient.to(scores.dtype), torch.exp(scores - output.lse[..., None])
    grad_shares = wide @ value.to(scores.dtype).transpose(-1, -2)
    common = (wide * output.values.to(scores.dtype)).sum(dim=-1, keepdim=True)
    grad_scores = shares * (grad_shares - common) * visibility.scale
    return AttentionGradients(
        (grad_scores @ key.to(scores.dtype)).to(query.dtype),
        (grad_scores.transpose(-1, -2) @ query.to(scores.dtype)).to(key.dtype),
        (shares.transpose(-1, -2) @ wide).to(value.dtype),
    )


def _scores(query: Tensor, key: Tensor, visibility: Visibility) -> Tensor:
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    scores = query.to(dtype) @ key.to(dtype).transpose(-1, -2) * visibility.scale
    if visibility.mask is not None:
        scores = scores + visibility.mask
    if visibility.causal:
        scores = scores + causal_mask(query.shape[2], scores.dtype, scores.device)
    return scores


def causal_mask(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return [length, length]: 0 where a query sees a key, and `masked_score` elsewhere."""
    return torch.full((length, length), masked_score(dtype), dtype=dtype, device=device).triu(1)


def masked_score(dtype: torch.dtype) -> float:
    """Return the number that hides a key when it is added to its score.

    It is finite: the output of a query that sees no key is an unused mean over keys, and no NaN.
    """
    return torch.finfo(dtype).min / 4


def _has_flash(query: Tensor, visibility: Visibility) -> bool:
    return not query.is_cpu and query.dtype in _HALF and visibility.mask is None and query.shape[-1] <= 256
