"""Attention over sequences that are divided: keys and values travel once around, queries stay.

    round 0    rank 0: own keys, causal              rank 1: own keys, causal
    round 1    rank 0: last chunk's queries see      rank 1: all queries see the front chunk of rank 0's keys
                       all of rank 1's keys
    each round is joined with those before by its sum of exponentials, and the next keys arrive while it runs

(Liu et al. 2023, ring attention, arXiv:2310.01889; the order of chunks is that of Brandon et al. 2023, striped
attention's balance with whole chunks, arXiv:2311.09431.) Backward: keys and values go around again, and their gradients
travel with them, home after the last round.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.core.errors import ConfigError, Problem, RunFailed
from lockstep.distributed.sequences import SequencePartition, chunks_of, current, enter
from lockstep.engine.attention_kernels import (
    Mixed,
    Seen,
    attend,
    attend_backward,
    causal_mask,
    out_of_sight,
)

_KEY = "parallel.context"
_NAME = "lockstep_ring"
_whole_attention = F.scaled_dot_product_attention


def ring_attention(query: Tensor, key: Tensor, value: Tensor, *, causal: bool, scale: float | None = None) -> Tensor:
    """softmax(q k' scale) v, over the whole sequences of which this rank has `current()` positions.

    Args:
        query: [B, H, own, D]; key and value: [B, K, own, D], K a divisor of H.
        scale: 1 / sqrt(D), if it isn't given.

    Raises:
        RunFailed: queries or keys are not this rank's positions.
    """
    division = current()
    assert division is not None, "sequences are whole"
    for what, tensor in (("queries", query), ("keys", key)):
        if tensor.dim() != 4 or tensor.shape[2] != division.own:
            raise RunFailed(
                f"{_KEY}: attention has {what} {list(tensor.shape)}, and this rank has {division.own} positions of "
                "each sequence: attention of another kind, such as to a second sequence, can't be divided"
            )
    kind = query.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = (one if one.dtype is torch.float64 else one.to(dtype) for one in (query, key, value))
    with torch.autocast(kind, enabled=False):
        shape = _Shape(query.shape[-1] ** -0.5 if scale is None else scale, causal, query.shape[1] // key.shape[1])
        return _Around.apply(query, key, value, division, shape)  # type: ignore[no-any-return, no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Shape:
    """Attributes:
    group: queries that share a key.
    """

    scale: float
    causal: bool
    group: int


class _Round(NamedTuple):
    """What one round computes.

    Attributes:
        queries: of this rank's, from which place on.
        keys: of those that have come, up to which place.
    """

    queries: int
    keys: int
    seen: Seen


def _round(division: SequencePartition, shape: _Shape, source: int, dtype: torch.dtype) -> _Round:
    """Of the keys that belong to rank `source`.

    Later chunks see earlier ones: of a rank before this one, the front chunk is before both of ours and the other one
    after both; of one after this, both are between ours.
    """
    rank, chunk = division.ring.rank, division.chunk
    queries, keys = 0, 2 * chunk
    if shape.causal and source < rank:
        keys = chunk
    if shape.causal and source > rank:
        queries = chunk
    hides = not (shape.causal and division.unreal_last)
    mask = _mask(division, source, keys, dtype) if hides else None
    own = shape.causal and source == rank
    if mask is None:
        return _Round(queries, keys, Seen(shape.scale, causal=own))
    mask = mask.expand(-1, -1, 2 * chunk - queries, -1)
    if own:
        mask = torch.minimum(mask, causal_mask(2 * chunk, dtype, mask.device))
    return _Round(queries, keys, Seen(shape.scale, mask=mask))


def _mask(division: SequencePartition, source: int, keys: int, dtype: torch.dtype) -> Tensor | None:
    """[B, 1, 1, keys], of the first `keys` of a rank's."""
    if division.real is None:
        return None
    chunk = division.chunk
    parts = [division.real[:, one * chunk : (one + 1) * chunk] for one in chunks_of(source, division.ring.size)]
    real = torch.cat(parts, dim=1)[:, :keys]
    hidden = torch.zeros(real.shape, dtype=dtype, device=real.device).masked_fill_(~real, out_of_sight(dtype))
    return hidden[:, None, None, :]


class _Around(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, division: SequencePartition, shape: _Shape
    ) -> Tensor:
        ring, mixed = division.ring, None
        held = [key.detach(), value.detach()]
        for number in range(ring.size):
            come = ring.pass_on(held) if number + 1 < ring.size else None
            at = _round(division, shape, (ring.rank - number) % ring.size, query.dtype)
            keys, values = (_for_each_query(one[:, :, : at.keys], shape.group) for one in held)
            found = attend(query[:, :, at.queries :], keys, values, at.seen)
            mixed = found if mixed is None else _joined(mixed, found, at.queries)
            if come is not None:
                held = come()
        assert mixed is not None
        values = mixed.values.to(query.dtype)
        ctx.save_for_backward(query, key, value, values, mixed.lse)
        ctx.division, ctx.shape = division, shape
        return values

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, values, lse = ctx.saved_tensors
        division, shape = ctx.division, ctx.shape
        ring, held = division.ring, [key, value]
        of_query = torch.zeros(query.shape, dtype=lse.dtype, device=query.device)
        home: Callable[[], list[Tensor]] | None = None
        for number in range(ring.size):
            come = ring.pass_on(held) if number + 1 < ring.size else None
            at = _round(division, shape, (ring.rank - number) % ring.size, query.dtype)
            keys, mine = (_for_each_query(one[:, :, : at.keys], shape.group) for one in held)
            rows = slice(at.queries, None)
            mixed = Mixed(values[:, :, rows], lse[:, :, rows])
            found = attend_backward(gradient[:, :, rows], query[:, :, rows], keys, mine, mixed, at.seen)
            of_query[:, :, rows] += found.query
            travel = [torch.zeros_like(one, dtype=lse.dtype) for one in held] if home is None else home()
            for total, part in zip(travel, (found.key, found.value), strict=True):
                total[:, :, : at.keys] += _of_shared(part, shape.group)
            home = ring.pass_on(travel)  # there after the last round
            if come is not None:
                held = come()
        assert home is not None
        of_key, of_value = home()
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None, None


def _joined(one: Mixed, other: Mixed, first: int) -> Mixed:
    """Of the queries from `first` on, those of `other`; in fp32."""
    values, lse = one.values.to(one.lse.dtype, copy=False), one.lse
    old, new = lse[:, :, first:], other.lse
    total = torch.logaddexp(old, new)
    mixed = values[:, :, first:] * torch.exp(old - total)[..., None]
    mixed += other.values.to(lse.dtype) * torch.exp(new - total)[..., None]
    if first == 0:
        return Mixed(mixed, total)
    return Mixed(torch.cat([values[:, :, :first], mixed], dim=2), torch.cat([lse[:, :, :first], total], dim=2))


def _for_each_query(keys: Tensor, group: int) -> Tensor:
    """[B, K, T, D] -> [B, H, T, D]."""
    return keys if group == 1 else keys.repeat_interleave(group, dim=1)


def _of_shared(gradient: Tensor, group: int) -> Tensor:
    """[B, H, T, D] -> [B, K, T, D]: the sum of what the queries of a group say."""
    return gradient if group == 1 else gradient.view(len(gradient), -1, group, *gradient.shape[2:]).sum(dim=2)


# --- in a model ---------------------------------------------------------------------------------------------------


class RingInModel:
    """Puts ring attention in the place of `scaled_dot_product_attention`, and of the attention that a model of the
    transformers library has, while sequences are divided.

    Args:
        model: whose attention it is.
    """

    def __init__(self, model: nn.Module) -> None:
        self._configs = _configs_with_attention(model)
        self._usual = [config._attn_implementation for config in self._configs]
        if self._configs:
            from transformers import AttentionInterface

            AttentionInterface.register(_NAME, _of_transformers)

    @property
    def asks_for_masks(self) -> bool:
        """Whether the model hands its mask of padding on to its attention, which asks the division in place of it."""
        return bool(self._configs)

    def enter(self, division: SequencePartition) -> None:
        """Until `leave`."""
        enter(division)
        F.scaled_dot_product_attention = _of_torch
        for config in self._configs:
            config._attn_implementation = _NAME

    def leave(self) -> None:
        """Sequences are whole again."""
        enter(None)
        F.scaled_dot_product_attention = _whole_attention
        for config, usual in zip(self._configs, self._usual, strict=True):
            config._attn_implementation = usual


@contextmanager
def whole_sequences(inside: RingInModel) -> Iterator[None]:
    """However it ends, attention is the usual one afterwards."""
    try:
        yield
    finally:
        inside.leave()


def _of_torch(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """In the place of F.scaled_dot_product_attention."""
    if attn_mask is not None:
        raise _cant("makes a mask of its own for its attention", "attention that is causal, or sees everything")
    _refuse_dropout(dropout_p)
    return ring_attention(query, key, value, causal=is_causal, scale=scale)


def _of_transformers(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """An attention function of the transformers library."""
    if attention_mask is not None:
        raise _cant("makes a mask of its own for its attention", "attention that is causal, or sees everything")
    window = options.get("sliding_window")
    division = current()
    if window is not None and division is not None and window < division.length:
        raise _cant(f"lets tokens see {window} tokens back (sliding_window)", "attention that sees everything before")
    for name in ("softcap", "s_aux", "position_bias"):
        if options.get(name) is not None:
            raise _cant(f"gives its attention {name}", "plain attention")
    _refuse_dropout(dropout)
    causal = bool(getattr(module, "is_causal", True)) if is_causal is None else is_causal
    mixed = ring_attention(query, key, value, causal=causal, scale=scaling)
    return mixed.transpose(1, 2).contiguous(), None


def _refuse_dropout(share: float) -> None:
    if share:
        why = (
            f"the model drops {share:g} of its attention, whose weights no rank has together; set that dropout to 0 "
            "(of a model of the transformers library: model.architecture.attention_dropout, attn_pdrop, or "
            "attention_probs_dropout_prob)"
        )
        raise ConfigError(Problem("", _KEY, why))


def _cant(does: str, takes: str) -> ConfigError:
    why = f"the model {does}, and ring attention is for {takes}; leave parallel.context out"
    return ConfigError(Problem("", _KEY, why))


def _configs_with_attention(model: nn.Module) -> list[Any]:
    """Of models of the transformers library: each config that says which attention to take."""
    found: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation"):
            found[id(config)] = config
    return list(found.values())


def takes_positions(model: nn.Module) -> bool:
    """Whether its forward has an argument for where tokens are, as those of the transformers library do."""
    return "position_ids" in inspect.signature(model.forward).parameters
