"""Cross-entropy over a model's last linear, a few positions at a time: the logits are never in memory at once.

    hidden [N, W]   -->  chunk [n, W]  -->  logits [n, V]  -->  log-sum-exp [n], loss      forward keeps hidden, lse
                         chunk again   -->  logits again   -->  softmax - target --> gradients of chunk and weight

The loss is computed where the logits would be, inside the head's forward: what FSDP and ZeRO gather for it is
there, in the backward too. Beforehand the objective gives the head the targets; the model returns a number in place of
logits, and the objective makes sure that it is this very number.
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
from lockstep.core.records import Batch
from lockstep.models.objectives import IGNORED, ClassifierLoss, ModelLoss, SpanLoss, TargetLoss
from lockstep.models.outputs import logits_of
from lockstep.models.transformer import Transformer

_KEY = "memory.loss_chunk"


class Sums(NamedTuple):
    """Sums over the valid targets of a micro-batch, 0-dim.

    Attributes:
        loss: with label smoothing, fp32.
        plain: without.
        right: how often the target was the likeliest.
    """

    loss: Tensor
    plain: Tensor
    right: Tensor


def chunked_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int, smoothing: float
) -> Sums:
    """Return the sums of `cross_entropy_sum(hidden weight' + bias, targets)`, losses in fp32, products in autocast's
    precision where it is on.

    Args:
        hidden, weight, targets: [N, W], [V, W], [N].
        chunk: positions at a time.
        smoothing: of labels, as of `objectives.cross_entropy_sum`.
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
            own = logits.gather(1, chosen.clamp(min=0)[:, None])[:, 0]
            missed = ((lse[part] - own) * valid).sum()
            plain += missed
            loss += (1 - smoothing) * missed
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
        wants_hidden, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        of_hidden = torch.empty_like(hidden) if wants_hidden else None
        of_weight = torch.zeros(weight.shape, device=weight.device) if wants_weight else None
        of_bias = torch.zeros(bias.shape, device=bias.device) if wants_bias else None
        for part in _chunks(hidden, ctx.chunk):
            logits = F.linear(hidden[part], weight, bias).float()
            gradient = _logit_gradient(logits, lse[part], targets[part], ctx.smoothing).mul_(seed)
            if of_bias is not None:
                of_bias += gradient.sum(dim=0)
            gradient = gradient.to(hidden.dtype)
            if of_hidden is not None:
                torch.mm(gradient, weight, out=of_hidden[part])
            if of_weight is not None:
                _add_product(of_weight, gradient.T, hidden[part])
        return of_hidden, _cast(of_weight, weight), _cast(of_bias, bias), None, None, None


def _chunks(hidden: Tensor, chunk: int) -> Iterator[slice]:
    return (slice(start, start + chunk) for start in range(0, hidden.shape[0], chunk))


def _logit_gradient(logits: Tensor, lse: Tensor, targets: Tensor, smoothing: float) -> Tensor:
    """Return softmax - (1 - e) x target - e / V, in place, and zero where there is no target."""
    valid = (targets != IGNORED)[:, None]
    softmax = logits.sub_(lse[:, None]).exp_()
    softmax.scatter_add_(1, targets.clamp(min=0)[:, None], torch.full_like(softmax[:, :1], smoothing - 1))
    if smoothing:
        softmax.sub_(smoothing / softmax.shape[1])
    return softmax.mul_(valid)


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if left.dtype is total.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


def _cast(gradient: Tensor | None, like: Tensor | None) -> Tensor | None:
    return None if gradient is None or like is None else gradient.to(like.dtype)


# --- in a model ---------------------------------------------------------------------------------------------------


class ChunkedHeadLoss:
    """A cross-entropy objective whose loss the model's head computes.

    Args:
        objective: whose sums it computes.
        head: the model's last linear; its forward is replaced.
        chunk: positions at a time.
    """

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
        """Set the targets of the next forward; the batch stays as it is."""
        self._targets, self._sums = self._objective.targets_of(batch), None
        return batch

    def loss_sum(self, outputs: object, batch: Batch) -> Tensor:
        """Return the head's sum; raise RunFailed if the model doesn't return its logits as they are."""
        sums, returned = self._sums, logits_of(outputs)
        if sums is None or returned.data_ptr() != sums.loss.data_ptr() or sums.loss._version != self._version:
            raise RunFailed(
                f"{_KEY}: the model computes with its logits (it scales or caps them, or calls its head more than "
                "once), and here there are none; leave it out"
            )
        return returned

    def metric_sums(self, outputs: object, batch: Batch) -> Mapping[str, Tensor]:
        """Return the sums that the objective would."""
        assert self._sums is not None, "loss_sum() comes first"
        sums = {"right": self._sums.right}
        return {**sums, "plain_loss": self._sums.plain} if self._objective.label_smoothing else sums

    def _forward(self, head: nn.Linear, forward: Any, hidden: Tensor) -> Tensor:
        targets, self._targets = self._targets, None
        if targets is None:  # no loss is wanted: a text is generated
            return cast("Tensor", forward(hidden))
        if hidden.shape[:-1] != targets.shape:
            raise RunFailed(
                f"{_KEY}: the head is called for positions {list(hidden.shape[:-1])}, and there are targets for "
                f"{list(targets.shape)}; leave it out"
            )
        self._sums = chunked_cross_entropy(
            hidden.flatten(0, -2),
            head.weight,
            head.bias,
            targets.flatten(),
            self._chunk,
            self._objective.label_smoothing,
        )
        self._version = self._sums.loss._version
        return self._sums.loss


def chunk_head_loss(objective: EvaluatedObjective, model: nn.Module, chunk: int) -> ChunkedHeadLoss:
    """Move the loss into the model's head.

    Raises:
        ConfigError: the objective is no cross-entropy of tokens, or the model has no head that is known.
    """
    if not isinstance(objective, TargetLoss) or not objective.language:
        ours, of_samples = (
            isinstance(objective, SpanLoss | ModelLoss),
            isinstance(objective, TargetLoss | ClassifierLoss),
        )
        kind = "of one class a sample" if of_samples else "that of the model's head" if ours else "a custom one"
        raise _refused(
            f"computes a cross-entropy of tokens a few positions at a time, and this objective is {kind}; leave it out"
        )
    getter = getattr(model, "get_output_embeddings", None)  # of the transformers library's models
    head = model.head if isinstance(model, Transformer) else getter() if callable(getter) else None
    if not isinstance(head, nn.Linear):
        raise _refused(
            f"the linear that makes the logits of a {type(model).__name__} is not known; it is for kind transformer "
            "and language models of the transformers library"
        )
    return ChunkedHeadLoss(objective, head, chunk)


def _refused(why: str) -> ConfigError:
    return ConfigError(Problem("", _KEY, why))
