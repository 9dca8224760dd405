"""Cross-entropy of a model's last linear layer, a few positions at a time: all logits are never in memory at once.

    hidden [N, W]   -->  chunk [n, W]  -->  logits [n, V]  -->  log-sum-exp [n], loss      forward keeps hidden, lse
                         chunk again   -->  logits again   -->  softmax - target --> gradients of chunk and weight

The loss is computed in the head's forward, where FSDP and ZeRO have gathered its weight. The objective gives the
targets to the head before the forward; the model returns the loss instead of logits, and the objective checks that the
model hasn't changed it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.core.errors import ConfigError, Problem, RunFailed
from lockstep.core.protocols import EvaluatedObjective
from lockstep.core.records import IGNORED, Batch
from lockstep.models.objectives import TargetLoss
from lockstep.models.outputs import logits_of
from lockstep.models.transformer import Transformer

_KEY = "memory.loss_chunk"


class Sums(NamedTuple):
    """Sums over the valid targets of a micro-batch, 0-dim.

    Attributes:
        loss: The loss with label smoothing, fp32.
        plain: The loss without it.
        right: The number of targets with the largest logit.
    """

    loss: Tensor
    plain: Tensor
    right: Tensor


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int, smoothing: float
) -> Sums:
    """Return the sums of `objectives.cross_entropy_sum(hidden weight' + bias, targets, smoothing)`.

    Losses are in fp32; products are in autocast's precision.

    Args:
        hidden, weight, targets: [N, W], [V, W], [N].
        chunk: Number of positions at a time.
    """
    kind = hidden.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        hidden, weight, bias = hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    with torch.autocast(kind, enabled=False):
        return Sums(*_Chunked.apply(hidden, weight, bias, targets, chunk, smoothing))  # type: ignore[no-untyped-call]


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int, smoothing: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        zero = torch.zeros((), device=hidden.device)
        loss, plain, right = zero.clone(), zero.clone(), torch.zeros((), dtype=torch.int64, device=hidden.device)
        lse = torch.empty(hidden.shape[0], device=hidden.device)
        for part in _chunks(hidden, chunk):
            logits, chosen = F.linear(hidden[part], weight, bias).float(), targets[part]
            valid = chosen != IGNORED
            lse[part] = torch.logsumexp(logits, dim=-1)
            target_logits = logits.gather(1, chosen.clamp(min=0)[:, None])[:, 0]
            part_loss = ((lse[part] - target_logits) * valid).sum()
            plain += part_loss
            loss += (1 - smoothing) * part_loss
            if smoothing:
                loss += smoothing * ((lse[part] - logits.mean(dim=-1)) * valid).sum()
            right += ((logits.argmax(dim=-1) == chosen) & valid).sum()
        ctx.save_for_backward(hidden, weight, bias, targets, lse)
        ctx.chunk, ctx.smoothing = chunk, smoothing
        ctx.mark_non_differentiable(plain, right)
        return loss, plain, right

    @staticmethod
    def backward(ctx: Any, seed: Tensor, *_unused: Any) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets, lse = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        of_hidden = torch.empty_like(hidden) if needs_hidden else None
        of_weight = torch.zeros(weight.shape, device=weight.device) if needs_weight else None
        of_bias = torch.zeros(bias.shape, device=bias.device) if needs_bias else None
        for part in _chunks(hidden, ctx.chunk):
            logits = F.linear(hidden[part], weight, bias).float()
            gradient = _logit_gradient(logits, lse[part], targets[part], ctx.smoothing).mul_(seed)
            if of_bias is not None:
                of_bias += gradient.sum(dim=0)
            gradient = gradient.to(hidden.dtype)
            if of_hidden is not None:
                torch.mm(gradient, weight, out=of_hidden[part])
            if of_weight is not None and gradient.dtype is of_weight.dtype:
                of_weight.addmm_(gradient.T, hidden[part])
            elif of_weight is not None:
                of_weight += gradient.T @ hidden[part]
        return of_hidden, _cast(of_weight, weight), _cast(of_bias, bias), None, None, None


def _chunks(hidden: Tensor, chunk: int) -> Iterator[slice]:
    return (slice(start, start + chunk) for start in range(0, hidden.shape[0], chunk))


def _logit_gradient(logits: Tensor, lse: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """Return softmax - (1 - e) x target - e / V, in place; zero for ignored targets."""
    valid = (targets != IGNORED)[:, None]
    softmax = logits.sub_(lse[:, None]).exp_()
    softmax.scatter_add_(1, targets.clamp(min=0)[:, None], torch.full_like(softmax[:, :1], smoothing - 1))
    if smoothing:
        softmax.sub_(smoothing / softmax.shape[1])
    return softmax.mul_(valid)


def _cast(gradient: Tensor | None, like: Tensor | None) -> Tensor | None:
    return None if gradient is None or like is None else gradient.to(like.dtype)


# --- in a model ---------------------------------------------------------------------------------------------------


class ChunkedHeadLoss:
    """A cross-entropy objective with its loss computed by the model's head, in a replaced forward."""

    def __init__(self, objective: TargetLoss, head: nn.Linear, chunk: int) -> None:
        self._objective = objective
        self._chunk = chunk
        self._targets: Tensor | None = None
        self._sums: Sums | None = None
        self._version = 0
        self.decomposes = objective.decomposes
        self.count = objective.count
        self.metrics = objective.metrics
        cast("Any", head).forward = partial(self._forward, head, head.forward)

    def show(self, batch: Batch) -> Batch:
        """Set the targets of the next forward; return the batch unchanged."""
        self._targets, self._sums = self._objective.targets_of(batch), None
        return batch

    def loss_sum(self, outputs: object, batch: Batch) -> Tensor:
        """Return the head's sum; raise RunFailed if the model doesn't return the head's output unchanged."""
        sums, returned = self._sums, logits_of(outputs)
        if sums is None or returned.data_ptr() != sums.loss.data_ptr() or sums.loss._version != self._version:
            raise RunFailed(
                f"{_KEY}: the model computes with its logits (it scales or caps them, or calls its head more than "
                f"once), but a chunked loss has no logits; remove {_KEY}"
            )
        return returned

    def metric_sums(self, outputs: object, batch: Batch) -> Mapping[str, Tensor]:
        """Return the metric sums of the objective."""
        assert self._sums is not None, "loss_sum() comes first"
        sums = {"right": self._sums.right}
        return {**sums, "plain_loss": self._sums.plain} if self._objective.label_smoothing else sums

    def _forward(self, head: nn.Linear, forward: Any, hidden: Tensor) -> Tensor:
        targets, self._targets = self._targets, None
        if targets is None:  # the forward is for generation, without a loss
            return cast("Tensor", forward(hidden))
        if hidden.shape[:-1] != targets.shape:
            raise RunFailed(
                f"{_KEY}: the head is called for positions {list(hidden.shape[:-1])}, but there are targets for "
                f"{list(targets.shape)}; remove {_KEY}"
            )
        given, smoothing = hidden.flatten(0, -2), self._objective.label_smoothing
        self._sums = chunked_cross_entropy(given, head.weight, head.bias, targets.flatten(), self._chunk, smoothing)
        self._version = self._sums.loss._version
        return self._sums.loss


def chunk_head_loss(objective: EvaluatedObjective, model: nn.Module, chunk: int) -> ChunkedHeadLoss:
    """Move the loss into the model's head."""
    if not isinstance(objective, TargetLoss) or not objective.language:
        what = "computes a cross-entropy of tokens a few positions at a time"
        raise _refused(f"{what}, and no other objective; remove it")
    getter = getattr(model, "get_output_embeddings", None)  # of transformers models
    head = model.head if isinstance(model, Transformer) else getter() if callable(getter) else None
    if not isinstance(head, nn.Linear):
        raise _refused(
            f"the linear layer that computes the logits of a {type(model).__name__} is unknown; use it with kind "
            "transformer and language models of the transformers library"
        )
    return ChunkedHeadLoss(objective, head, chunk)


def _refused(reason: str) -> ConfigError:
    return ConfigError(Problem("", _KEY, reason))
