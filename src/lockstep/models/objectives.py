"""What a model is trained for: sums over valid targets, so that any split of the samples gives the same gradient.

    next-token        targets of every position    logits [B, T, V]    loss, perplexity, accuracy, bits_per_byte
    masked-lm         those of hidden positions    logits [B, T, V]    loss, perplexity, accuracy
    seq2seq           those of the target text     logits [B, T, V]    loss, perplexity, accuracy
    classification    one a sample                 logits [B, C]       loss, accuracy

A target of -100 is none. Losses are computed in fp32, whatever the precision of the outputs.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm  # the one class that all batch norms share

from lockstep.config import schema
from lockstep.core import protocols
from lockstep.core.errors import ConfigError, GiveUp, Problem
from lockstep.core.importing import construct
from lockstep.core.records import Batch, DataFacts
from lockstep.distributed.parts import is_sharded
from lockstep.models.divided_logits import divided_cross_entropy_sum, whole_logits
from lockstep.models.outputs import logits_of

IGNORED = -100
"""The target of a position that is to be no target: padding, a prompt."""


class NextToken:
    """Each position's target is the token after it.

    Args:
        shift: the targets are the input tokens themselves, aligned with them (transformers' convention), and position
            t is compared with target t + 1; otherwise they are the next tokens already.
        bytes_per_token: mean of the text behind the tokens; None if unknown.
    """

    decomposes = True
    language = True

    def __init__(
        self, *, shift: bool = False, label_smoothing: float = 0.0, bytes_per_token: float | None = None
    ) -> None:
        self._shift = shift
        self.label_smoothing = label_smoothing
        self._bytes_per_token = bytes_per_token

    def count(self, batch: Batch) -> int:
        return count_targets(batch.targets[:, 1:] if self._shift else batch.targets)

    def targets_of(self, batch: Batch) -> Tensor:
        """Of each position that has logits; -100 for none."""
        return F.pad(batch.targets[:, 1:], (0, 1), value=IGNORED) if self._shift else batch.targets

    def aligned(self) -> NextToken:
        """The same, of batches whose targets are what `targets_of` makes of them."""
        return NextToken(label_smoothing=self.label_smoothing, bytes_per_token=self._bytes_per_token)

    def loss_sum(self, outputs: object, batch: Batch) -> Tensor:
        return cross_entropy_sum(*self._aligned(outputs, batch), self.label_smoothing)

    def metric_sums(self, outputs: object, batch: Batch) -> Mapping[str, Tensor]:
        return _metric_sums(*self._aligned(outputs, batch), self.label_smoothing)

    def metrics(self, loss_sum: float, count: float, sums: Mapping[str, float]) -> dict[str, float]:
        return _language_metrics(loss_sum, count, sums, self._bytes_per_token)

    def _aligned(self, outputs: object, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = logits_of(outputs)
        return (logits[:, :-1], batch.targets[:, 1:]) if self._shift else (logits, batch.targets)


class Targets:
    """Targets at their own positions: hidden tokens, a text that the decoder has seen up to there, a sample's class.

    Args:
        language: they are tokens: metrics have the perplexity.
    """

    decomposes = True

    def __init__(self, *, language: bool, label_smoothing: float = 0.0) -> None:
        self.language = language
        self.label_smoothing = label_smoothing

    def count(self, batch: Batch) -> int:
        return count_targets(batch.targets)

    def targets_of(self, batch: Batch) -> Tensor:
        """Of each position that has logits; -100 for none."""
        targets: Tensor = batch.targets
        return targets

    def aligned(self) -> Targets:
        """Itself: they are at their own positions."""
        return self

    def loss_sum(self, outputs: object, batch: Batch) -> Tensor:
        return cross_entropy_sum(logits_of(outputs), batch.targets, self.label_smoothing)

    def metric_sums(self, outputs: object, batch: Batch) -> Mapping[str, Tensor]:
        return _metric_sums(logits_of(outputs), batch.targets, self.label_smoothing)

    def metrics(self, loss_sum: float, count: float, sums: Mapping[str, float]) -> dict[str, float]:
        if self.language:
            return _language_metrics(loss_sum, count, sums, None)
        return {"loss": _mean(loss_sum, count), "accuracy": _mean(sums["right"], count)}


def no_sums(outputs: object, batch: Batch) -> Mapping[str, Tensor]:
    """Nothing but the loss is measured."""
    return {}


def means(loss_sum: float, count: float, sums: Mapping[str, float]) -> dict[str, float]:
    """Each sum divided by the number of valid targets."""
    return {"loss": _mean(loss_sum, count), **{name: _mean(value, count) for name, value in sums.items()}}


@dataclass(frozen=True)
class FunctionObjective:
    """An objective made of functions: what the Python API takes.

    Attributes:
        count: valid targets in a batch.
        loss_sum: (outputs, batch) -> sum, not mean, of their losses, 0-dim.
        metric_sums: (outputs, batch) -> further 0-dim sums, by name.
        metrics: (loss_sum, count, sums) -> what people read, `loss` among it.
        decomposes: False if a batch's loss is not the sum of its samples' losses.
    """

    count: Callable[[Batch], int]
    loss_sum: Callable[[Any, Batch], Tensor]
    metric_sums: Callable[[Any, Batch], Mapping[str, Tensor]] = no_sums
    metrics: Callable[[float, float, Mapping[str, float]], dict[str, float]] = means
    decomposes: bool = True


@runtime_checkable
class CountsAndLosses(Protocol):
    """The least that an objective of your own needs; `metric_sums`, `metrics` and `decomposes` are optional."""

    def count(self, batch: Batch) -> int: ...

    def loss_sum(self, outputs: Any, batch: Batch) -> Tensor: ...


def build_objective(objective: schema.Objective, model: schema.Model, facts: DataFacts) -> protocols.Objective:
    """The objective that was asked for, or the one that the model is made for.

    Raises:
        ConfigError: it doesn't fit the model.
    """
    if objective.kind == "given":
        raise _problem("objective.kind", "`given` takes an objective handed over in Python, and none was")
    if objective.kind == "custom":
        assert objective.target is not None
        return adapt_objective(construct(objective.target, objective.arguments))
    kind = _kind(objective, model, facts)
    if objective.arguments:
        raise _problem("objective.arguments", f"these belong to `kind: custom`; {kind} takes none")
    if isinstance(model, schema.HuggingFaceModel) and (model.architecture or {}).get("output_router_logits"):
        raise _problem(
            "model.architecture.output_router_logits",
            f"asks for a balancing loss, which {kind} does not add; "
            "leave it out, or give an objective of your own that adds outputs.aux_loss (objective.kind: custom)",
        )
    smoothing = objective.label_smoothing
    if kind == "next-token":
        aligned = isinstance(model, schema.HuggingFaceModel)
        return NextToken(shift=aligned, label_smoothing=smoothing, bytes_per_token=facts.bytes_per_token)
    return Targets(language=kind != "classification", label_smoothing=smoothing)


def adapt_objective(objective: object) -> protocols.Objective:
    """An objective from what a user gives through the Python API or names in a config.

    Args:
        objective: one with `count` and `loss_sum`; a loss module of torch with `reduction="sum"`, called with
            (outputs, batch.targets); or a function (outputs, batch) -> sum of losses, with one target a sample.

    Raises:
        ConfigError: none of these, or a loss module that takes the mean.
    """
    if isinstance(objective, FunctionObjective | NextToken | Targets):
        return objective
    if isinstance(objective, CountsAndLosses) and not inspect.isclass(objective):
        given = ("metric_sums", "metrics", "decomposes")
        optional = {name: getattr(objective, name) for name in given if getattr(objective, name, None) is not None}
        return FunctionObjective(objective.count, objective.loss_sum, **optional)
    if isinstance(objective, nn.modules.loss._Loss):
        return _from_loss_module(objective)
    if callable(objective) and not inspect.isclass(objective):
        return FunctionObjective(count=lambda batch: batch.samples, loss_sum=objective)
    raise ConfigError(
        f"an objective is an object with count(batch) and loss_sum(outputs, batch), or a function "
        f"(outputs, batch) -> sum of losses; this is {_describe(objective)}"
    )


def coupling(module: nn.Module) -> str | None:
    """What in the module makes a batch's loss more than the sum of its samples' losses, and where; None if nothing
    known does."""
    norms = [name for name, child in module.named_modules() if isinstance(child, _BatchNorm)]
    found = [f"batch norm ({_first(norms)})"] if norms else []
    if getattr(getattr(module, "config", None), "output_router_logits", False):  # a transformers mixture of experts
        found.append("the experts' balancing loss (output_router_logits)")
    return " and ".join(found) or None


def count_targets(targets: Tensor) -> int:
    """How many are not -100. NumPy counts 4,096 of them in 3 us, torch in 8."""
    if targets.is_floating_point():
        raise GiveUp(f"targets are {targets.dtype}; the built-in objectives take class or token numbers (int64)")
    if targets.is_cpu:
        return int(np.count_nonzero(targets.numpy() != IGNORED))
    return int((targets != IGNORED).sum())


def cross_entropy_sum(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Sum over valid targets; fp32, 0-dim. logits [..., V], targets [...].

    With label smoothing e, each target's loss is (1 - e) x its own + e x the mean over all tokens (Szegedy et al. 2016,
    arXiv:1512.00567, section 7), which is a sum over targets all the same.
    """
    if is_sharded(logits):
        return divided_cross_entropy_sum(logits, targets, label_smoothing, IGNORED)
    if logits.dim() > 2:
        logits, targets = logits.flatten(0, -2), targets.flatten()
    if logits.dtype is not torch.float32:
        logits = logits.float()
    return F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED, label_smoothing=label_smoothing)


def _from_loss_module(loss: nn.modules.loss._Loss) -> FunctionObjective:
    name = type(loss).__name__
    if loss.reduction != "sum":
        raise ConfigError(
            f"{name} has reduction={loss.reduction!r}; a run is the same under any split of its samples only if losses "
            f'are summed and divided once, by the global count: give {name}(reduction="sum")'
        )
    ignored = getattr(loss, "ignore_index", None)  # of cross entropy and NLL alone
    count = count_targets if ignored == IGNORED else (lambda targets: int((targets != ignored).sum()))
    return FunctionObjective(
        count=(lambda batch: batch.samples) if ignored is None else (lambda batch: count(batch.targets)),
        loss_sum=lambda outputs, batch: loss(outputs.float(), batch.targets),
    )


def _kind(objective: schema.Objective, model: schema.Model, facts: DataFacts) -> str:
    """Raises:
    ConfigError: asked for something that the model can't do.
    """
    if isinstance(model, schema.CustomModel | schema.GivenModel):
        return objective.kind if objective.kind != "auto" else _kind_of_data(facts)
    made_for = _made_for(model)
    if objective.kind not in ("auto", made_for):
        raise _problem(
            "objective.kind",
            f"{objective.kind!r} does not fit a model of kind {model.kind!r}, which is made for "
            f"{made_for!r}; leave it `auto`, or give an objective of your own (`custom`)",
        )
    return made_for


def _made_for(model: schema.Model) -> str:
    if isinstance(model, schema.HuggingFaceModel):
        return {"causal-lm": "next-token", "sequence-classification": "classification"}.get(model.task, model.task)
    return "next-token" if isinstance(model, schema.TransformerModel) else "classification"


def _kind_of_data(facts: DataFacts) -> str:
    if facts.classes is not None:
        return "classification"
    if facts.vocabulary is not None:
        return "next-token"
    raise _problem(
        "objective.kind",
        "neither the model (your own) nor the data (no classes, no tokens) says what to train for; "
        "one of next-token, masked-lm, classification, seq2seq, custom",
    )


def _metric_sums(logits: Tensor, targets: Tensor, label_smoothing: float) -> dict[str, Tensor]:
    """Right answers; under label smoothing also the plain loss, which perplexity and bits per byte are made of. Divided
    logits are put together for it."""
    logits = whole_logits(logits)
    sums = {"right": (logits.argmax(-1) == targets).sum()}  # -100 is never the argmax
    if label_smoothing:
        sums["plain_loss"] = cross_entropy_sum(logits, targets)
    return sums


def _language_metrics(
    loss_sum: float, count: float, sums: Mapping[str, float], bytes_per_token: float | None
) -> dict[str, float]:
    nats = _mean(sums.get("plain_loss", loss_sum), count)
    metrics = {
        "loss": _mean(loss_sum, count),
        "perplexity": math.exp(nats) if nats < 700 else math.inf,
        "accuracy": _mean(sums["right"], count),
    }
    if bytes_per_token is not None:
        metrics["bits_per_byte"] = nats / math.log(2) / bytes_per_token
    return metrics


def _mean(total: float, count: float) -> float:
    return total / count if count else math.nan


def _describe(thing: object) -> str:
    return f"the class {thing.__name__}, not an object of it" if inspect.isclass(thing) else f"a {type(thing).__name__}"


def _first(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _problem(key: str, message: str) -> ConfigError:
    return ConfigError(Problem("", key, message))
