"""The objective of a run: the one that the config names, that a program hands over, or that the model is made for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # the one class that all batch norms share

from lockstep.config import schema
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.protocols import EvaluatedObjective, Objective
from lockstep.models.heads import Head
from lockstep.models.objectives import IGNORED, ClassifierLoss, ModelLoss, SpanLoss, TargetLoss
from lockstep.models.torch_losses import TorchLoss, construct_objective, loss_module

if TYPE_CHECKING:
    from lockstep.core.records import Batch, DataFacts

_TASK_KINDS = {
    "causal-lm": "next-token",
    "speech-seq2seq": "seq2seq",
    "sequence-classification": "classification",
    "image-classification": "classification",
    "audio-classification": "classification",
    "ctc": "model",
}
"""Kinds of objectives by tasks of a transformers model; other tasks have the name of their kind."""


def no_sums(outputs: object, batch: Batch) -> Mapping[str, Tensor]:
    """Return nothing: only the loss is measured."""
    return {}


def means(loss_sum: float, count: float, sums: Mapping[str, float]) -> dict[str, float]:
    """Return each sum divided by the number of valid targets."""
    return {name: value / count if count else float("nan") for name, value in {"loss": loss_sum, **sums}.items()}


@dataclass(frozen=True)
class FunctionObjective:
    """An objective made of functions.

    Attributes:
        count: valid targets in a batch.
        loss_sum: (outputs, batch) -> sum, not mean, of their losses, 0-dim.
        metric_sums: (outputs, batch) -> further 0-dim sums, by name.
        metrics: (loss_sum, count, sums) -> reported metrics, `loss` among them.
        decomposes: False if a batch's loss is not the sum of its samples' losses.
    """

    count: Callable[[Batch], float]
    loss_sum: Callable[[Any, Batch], Tensor]
    metric_sums: Callable[[Any, Batch], Mapping[str, Tensor]] = no_sums
    metrics: Callable[[float, float, Mapping[str, float]], dict[str, float]] = means
    decomposes: bool = True


def build_objective(
    objective: schema.ObjectiveConfig,
    model: schema.Model,
    facts: DataFacts,
    head: Head | None = None,
    *,
    aligned: bool = False,
) -> EvaluatedObjective:
    """Return the objective that was asked for, or the one that the model is made for.

    Args:
        head: of a model of the transformers library, however it came.
        aligned: next-token targets are aligned with the input tokens, and are shifted here; otherwise they are the next
            tokens already.

    Raises:
        ConfigError: it doesn't fit the model.
    """
    kind = objective_kind(objective, model, facts, head)
    if kind == "given":
        raise _problem("objective.kind", "`given` takes an objective handed over in Python, and none was")
    if objective.target is not None:
        return adapt_objective(construct_objective(objective.target, objective.arguments))
    if objective.arguments:
        raise _problem("objective.arguments", f"these belong to `kind: custom`; {kind} takes none")
    smoothing = objective.label_smoothing
    match kind:
        case "next-token":
            bytes_per_token = facts.bytes_per_token
            return TargetLoss(language=True, shift=aligned, label_smoothing=smoothing, bytes_per_token=bytes_per_token)
        case "classification" if head is not None:
            return ClassifierLoss(head.config.num_labels, head.config.problem_type, smoothing)
        case "masked-lm" | "seq2seq":
            return TargetLoss(language=True, label_smoothing=smoothing)
        case "classification" | "token-classification" | "multiple-choice":
            return TargetLoss(language=False, label_smoothing=smoothing)
    if smoothing:
        why = f"{smoothing:g} is for one class or token a target, and this objective is {kind!r}; leave it out"
        raise _problem("objective.label_smoothing", why)
    if kind == "question-answering":
        return SpanLoss()
    assert head is not None, "only models of the transformers library compute a loss"
    shift = head.labels == "next-token" and head.shifts
    return ModelLoss(head.labels, shift=shift, summed=head.summed, decomposes=head.by_samples)


def repeats_inputs(batch: Batch) -> bool:
    """Return whether every valid target is the input token at its own position, as in transformers' labels, which are
    shifted later. Tokens that could be either, since all are the same, are no evidence."""
    targets = batch.targets
    if not isinstance(targets, Tensor) or targets.dim() != 2 or targets.is_floating_point():
        return False
    values = batch.inputs.values() if isinstance(batch.inputs, Mapping) else batch.inputs
    for tokens in values:
        if not isinstance(tokens, Tensor) or tokens.shape != targets.shape or tokens.is_floating_point():
            continue
        valid = targets != IGNORED
        if bool(valid.any()) and bool((tokens == targets)[valid].all()):
            return not bool((tokens[:, 1:] == targets[:, :-1])[valid[:, :-1]].all())
    return False


def adapt_objective(objective: object) -> EvaluatedObjective:
    """Return the objective for what a user gives through the Python API or names in a config.

    Args:
        objective: an object with `count` and `loss_sum`; a loss module or function of torch, which is given (outputs,
            batch.targets); or a function (outputs, batch) -> sum of losses, with one target a sample.

    Raises:
        ConfigError: it is none of these, or what a loss of torch divides by is not known.
    """
    if isinstance(objective, FunctionObjective | TargetLoss | TorchLoss):
        return objective
    if isinstance(objective, Objective) and not inspect.isclass(objective):
        optional = ("metric_sums", "metrics", "decomposes")
        given = {name: getattr(objective, name) for name in optional if getattr(objective, name, None) is not None}
        return FunctionObjective(objective.count, objective.loss_sum, **given)
    module = loss_module(objective)
    if module is not None:
        loss = TorchLoss(module)
        return loss if loss.is_known else FunctionObjective(loss.count, loss.loss_sum)
    if callable(objective) and not inspect.isclass(objective):
        return FunctionObjective(count=lambda batch: batch.samples, loss_sum=objective)
    kind = f"the class {objective.__name__}, not an object of it" if inspect.isclass(objective) else None
    raise ConfigError(
        "an objective is an object with count(batch) and loss_sum(outputs, batch), a loss of torch, or a function "
        f"(outputs, batch) -> sum of losses; this is {kind or f'a {type(objective).__name__}'}"
    )


def coupling(module: nn.Module) -> str | None:
    """Return what in the module makes a batch's loss more than the sum of its samples' losses, and its place; None if
    nothing known does."""
    norms = [name for name, child in module.named_modules() if isinstance(child, _BatchNorm)]
    more = f" and {len(norms) - 3} more" if len(norms) > 3 else ""
    causes = [f"batch norm ({', '.join(norms[:3])}{more})"] if norms else []
    if getattr(getattr(module, "config", None), "output_router_logits", False):  # a transformers mixture of experts
        causes.append("the experts' balancing loss (output_router_logits)")
    return " and ".join(causes) or None


def objective_kind(objective: schema.ObjectiveConfig, model: schema.Model, facts: DataFacts, head: Head | None) -> str:
    """Return the kind of the objective, of those in `objectives`, or `custom` or `given`.

    Raises:
        ConfigError: the model can't do what was asked for.
    """
    if objective.kind in ("custom", "given"):
        return objective.kind
    if isinstance(model, schema.CustomModel | schema.GivenModel) and head is None:
        return objective.kind if objective.kind != "auto" else _kind_of_data(facts)
    made_for = _made_for(model, head)
    if head is not None and head.kind == "model":
        unknown = head.labels == "model" and not head.by_samples
        fits = ("auto", "seq2seq", "masked-lm", made_for) if not unknown else None
        if fits is None and objective.kind != "auto":
            return objective.kind
        if fits is None or objective.kind in (*fits, head.labels):
            return "model"
    if objective.kind not in ("auto", made_for):
        what = f"a model of kind {model.kind!r}" if head is None else f"a {type(head.model).__name__}"
        raise _problem(
            "objective.kind",
            f"{objective.kind!r} does not fit {what}, which is made for "
            f"{made_for!r}; leave it `auto`, or give an objective of your own (`custom`)",
        )
    return made_for


def _made_for(model: schema.Model, head: Head | None) -> str:
    if isinstance(model, schema.HuggingFaceModel):
        return _TASK_KINDS.get(model.task, model.task)
    if head is not None:
        return head.labels
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


def _problem(key: str, message: str) -> ConfigError:
    return ConfigError(Problem("", key, message))
