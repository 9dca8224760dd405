"""Attention of some queries to some keys, with what it takes to join it with that to others.

    queries x keys --> mixed values, log of the sum of exponentials        (the sum weighs it against other keys')

    backward: of any part of the keys, given mixed values and sums over all of them

q [B, H, Q, D]; k, v [B, H, K, D]; lse [B, H, Q] fp32, fp64 of fp64. A mask [B, 1, Q, K] is added to the scores.
(Dao 2023, FlashAttention-2, arXiv:2307.08691, section 3.1: the same sums, over blocks of one device's memory.)
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


class Mixed(NamedTuple):
    """Attributes:
    values: softmax(q k' scale + mask) v, in q's dtype.
    lse: log of the sums that the softmax was divided by.
    """

    values: Tensor
    lse: Tensor


class Gradients(NamedTuple):
    """Of q, k and v, in their dtypes."""

    query: Tensor
    key: Tensor
    value: Tensor


@dataclass(frozen=True, slots=True)
class Seen:
    """Which keys a query sees, and what scores are multiplied by.

    Attributes:
        causal: query i sees keys up to i; there is no mask then.
    """

    scale: float
    causal: bool = False
    mask: Tensor | None = None


def attend(query: Tensor, key: Tensor, value: Tensor, seen: Seen) -> Mixed:
    """Forward; no gradient is recorded."""
    if query.device.type == "cpu":
        found = _flash_cpu(query, key, value, 0.0, seen.causal, attn_mask=seen.mask, scale=seen.scale)
        return Mixed(found[0], found[1])
    if _has_flash(query, seen):
        found = _flash(query, key, value, 0.0, seen.causal, scale=seen.scale)
        return Mixed(found[0], found[1])
    return attend_plainly(query, key, value, seen)


def attend_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, mixed: Mixed, seen: Seen) -> Gradients:
    """Args:
    gradient: of the mixed values, [B, H, Q, D].
    mixed: over all keys that the queries see, not these alone.
    """
    if query.device.type == "cpu":
        found = _flash_cpu_backward(
            gradient,
            query,
            key,
            value,
            mixed.values,
            mixed.lse,
            0.0,
            seen.causal,
            attn_mask=seen.mask,
            scale=seen.scale,
        )
        return Gradients(*found)
    if _has_flash(query, seen):
        none = torch.empty(0, device=query.device, dtype=torch.uint64)
        found = _flash_backward(
            gradient, query, key, value, mixed.values, mixed.lse, None, None, query.shape[2], key.shape[2], 0.0,
            seen.causal, none, none, scale=seen.scale,
        )  # fmt: skip
        return Gradients(*found)
    return attend_plainly_backward(gradient, query, key, value, mixed, seen)


def attend_plainly(query: Tensor, key: Tensor, value: Tensor, seen: Seen) -> Mixed:
    """`attend` by its formula, in fp32 or better: all scores are there at once."""
    scores = _scores(query, key, seen)
    lse = torch.logsumexp(scores, dim=-1)
    values = torch.exp(scores - lse[..., None]) @ value.to(scores.dtype)
    return Mixed(values.to(query.dtype), lse)


def attend_plainly_backward(
    gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, mixed: Mixed, seen: Seen
) -> Gradients:
    """`attend_backward` by its formula."""
    scores = _scores(query, key, seen)
    wide, shares = gradient.to(scores.dtype), torch.exp(scores - mixed.lse[..., None])
    of_shares = wide @ value.to(scores.dtype).transpose(-1, -2)
    common = (wide * mixed.values.to(scores.dtype)).sum(dim=-1, keepdim=True)
    of_scores = shares * (of_shares - common) * seen.scale
    return Gradients(
        (of_scores @ key.to(scores.dtype)).to(query.dtype),
        (of_scores.transpose(-1, -2) @ query.to(scores.dtype)).to(key.dtype),
        (shares.transpose(-1, -2) @ wide).to(value.dtype),
    )


def _scores(query: Tensor, key: Tensor, seen: Seen) -> Tensor:
    dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    scores = query.to(dtype) @ key.to(dtype).transpose(-1, -2) * seen.scale
    if seen.mask is not None:
        scores = scores + seen.mask
    if seen.causal:
        scores = scores + causal_mask(query.shape[2], scores.dtype, scores.device)
    return scores


def causal_mask(length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[length, length]: 0 where a query sees a key, and out of sight elsewhere."""
    return torch.full((length, length), out_of_sight(dtype), dtype=dtype, device=device).triu(1)


def out_of_sight(dtype: torch.dtype) -> float:
    """Added to a score, it leaves nothing of it. Finite: a query that sees no key at all makes no NaN, but a mean of
    whatever there is, which nobody asks for."""
    return torch.finfo(dtype).min / 4


def _has_flash(query: Tensor, seen: Seen) -> bool:
    return query.is_cuda and query.dtype in _HALF and seen.mask is None and query.shape[-1] <= 256
