"""Attention over sequences that are divided: keys and values go around a ring of ranks once, queries stay.

    round 0    rank 0: own keys, causal              rank 1: own keys, causal
    round 1    rank 0: last chunk's queries see      rank 1: all queries see the front chunk of rank 0's keys
                       all of rank 1's keys

Each round is merged with those before by its sum of exponentials, and the next keys arrive while it runs. In the
backward keys and values go around again with their gradients. (Liu et al. 2023, ring attention, arXiv:2310.01889;
chunks as in Brandon et al. 2023, arXiv:2311.09431.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lockstep.core.errors import RunFailed
from lockstep.distributed.forward_mode import SequencePartition, chunks_of
from lockstep.transforms.attention_kernels import (
    AttentionOutput,
    Visibility,
    attend,
    attend_backward,
    causal_mask,
    masked_score,
)


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, division: SequencePartition, *, causal: bool, scale: float | None = None
) -> Tensor:
    """Return softmax(q k' scale) v over whole sequences, for this rank's positions; by default scale = 1 / sqrt(D).

    Args:
        query: [B, H, own, D].
        key, value: [B, K, own, D], K a divisor of H.

    Raises:
        RunFailed: Queries or keys aren't this rank's positions.
    """
    for what, tensor in (("queries", query), ("keys", key)):
        if tensor.dim() != 4 or tensor.shape[2] != division.own:
            raise RunFailed(
                f"parallel.context: attention has {what} {list(tensor.shape)}, and this rank has {division.own} "
                "positions of each sequence: attention of another kind, such as to a second sequence, can't be divided"
            )
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        given = (query, key, value)
        query, key, value = (each if each.dtype is torch.float64 else each.to(dtype) for each in given)
    with torch.autocast(kind, enabled=False):
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        shape = _AttentionShape(scale, causal, query.shape[1] // key.shape[1])
        return _RingAttention.apply(query, key, value, division, shape)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True, slots=True)
class _AttentionShape:
    scale: float
    causal: bool
    group: int


class _Round(NamedTuple):
    """A round's queries, from the first that takes part, and the number of received keys that do."""

    first_query: int
    num_keys: int
    visibility: Visibility


def _round(division: SequencePartition, shape: _AttentionShape, source: int, dtype: torch.dtype) -> _Round:
    """Return the round with the keys that belong to rank `source`. Under causal attention later chunks see earlier."""
    rank, chunk = division.ring.rank, division.own // 2
    first_query, num_keys = 0, 2 * chunk
    if shape.causal and source < rank:  # its front chunk is before both of this rank's, the other one after both
        num_keys = chunk
    if shape.causal and source > rank:  # both of its chunks are between this rank's
        first_query = chunk
    needs_mask = division.real is not None and not (shape.causal and division.unreal_last)
    own = shape.causal and source == rank
    if not needs_mask:
        return _Round(first_query, num_keys, Visibility(shape.scale, causal=own))
    mask = _mask(division, source, num_keys, dtype).expand(-1, -1, 2 * chunk - first_query, -1)
    if own:
        mask = torch.minimum(mask, causal_mask(2 * chunk, dtype, mask.device))
    return _Round(first_query, num_keys, Visibility(shape.scale, mask=mask))


def _mask(division: SequencePartition, source: int, num_keys: int, dtype: torch.dtype) -> Tensor:
    """Return [B, 1, 1, num_keys], which hides a rank's keys that aren't real."""
    assert division.real is not None, "some positions aren't real"
    chunk = division.own // 2
    parts = [division.real[:, index * chunk : (index + 1) * chunk] for index in chunks_of(source, division.ring.size)]
    real = torch.cat(parts, dim=1)[:, :num_keys]
    mask = torch.zeros(real.shape, dtype=dtype, device=real.device).masked_fill_(~real, masked_score(dtype))
    return mask[:, None, None, :]


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, division: SequencePartition, shape: _AttentionShape
    ) -> Tensor:
        ring, merged = division.ring, None
        held = [key.detach(), value.detach()]
        for number in range(ring.size):
            receive = ring.pass_on(held) if number + 1 < ring.size else None
            part = _round(division, shape, (ring.rank - number) % ring.size, query.dtype)
            keys, values = (_repeat_keys(tensor[:, :, : part.num_keys], shape.group) for tensor in held)
            output = attend(query[:, :, part.first_query :], keys, values, part.visibility)
            merged = output if merged is None else _merge(merged, output, part.first_query)
            if receive is not None:
                held = receive()
        assert merged is not None
        values = merged.values.to(query.dtype)
        ctx.save_for_backward(query, key, value, values, merged.lse)
        ctx.division, ctx.shape = division, shape
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, values, lse = ctx.saved_tensors
        division, shape = ctx.division, ctx.shape
        ring, held = division.ring, [key, value]
        grad_query = torch.zeros(query.shape, dtype=lse.dtype, device=query.device)
        receive_grads: Callable[[], list[Tensor]] | None = None
        for number in range(ring.size):
            receive = ring.pass_on(held) if number + 1 < ring.size else None
            part = _round(division, shape, (ring.rank - number) % ring.size, query.dtype)
            keys, held_values = (_repeat_keys(tensor[:, :, : part.num_keys], shape.group) for tensor in held)
            rows = slice(part.first_query, None)
            output = AttentionOutput(values[:, :, rows], lse[:, :, rows])
            grads = attend_backward(gradient[:, :, rows], query[:, :, rows], keys, held_values, output, part.visibility)
            grad_query[:, :, rows] += grads.query
            if receive_grads is None:
                totals = [torch.zeros_like(tensor, dtype=lse.dtype) for tensor in held]
            else:
                totals = receive_grads()
            for total, grad in zip(totals, (grads.key, grads.value), strict=True):
                if shape.group > 1:  # [B, H, T, D] -> [B, K, T, D]: the sum over the queries that share a key
                    grad = grad.view(len(grad), -1, shape.group, *grad.shape[2:]).sum(dim=2)
                total[:, :, : part.num_keys] += grad
            receive_grads = ring.pass_on(totals)  # back on their rank after the last round
            if receive is not None:
                held = receive()
        assert receive_grads is not None
        grad_key, grad_value = receive_grads()
        return grad_query.to(query.dtype), grad_key.to(key.dtype), grad_value.to(value.dtype), None, None


def _merge(tensor: AttentionOutput, other: AttentionOutput, first: int) -> AttentionOutput:
    """Return attention to the keys of both; `other` is of the queries from `first` on. In fp32 or better."""
    values, lse = tensor.values.to(tensor.lse.dtype, copy=False), tensor.lse
    old, new = lse[:, :, first:], other.lse
    total = torch.logaddexp(old, new)
    joined = values[:, :, first:] * torch.exp(old - total)[..., None]
    joined += other.values.to(lse.dtype) * torch.exp(new - total)[..., None]
    if first == 0:
        return AttentionOutput(joined, total)
    pairs = ((values, joined), (lse, total))
    return AttentionOutput(*(torch.cat([whole[:, :, :first], rest], dim=2) for whole, rest in pairs))


def _repeat_keys(keys: Tensor, group: int) -> Tensor:
    return keys if group == 1 else keys.repeat_interleave(group, dim=1)
