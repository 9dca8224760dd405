"""The objective of a run: from the config, from the Python API, or the one that the model is made for."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # the one class that all batch norms share

from lockstep.config import schema
from lockstep.config.training_sections import PAIRS
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.formatting import listed
from lockstep.core.protocols import EvaluatedObjective, Objective
from lockstep.core.records import IGNORED
from lockstep.core.tasks import TASKS
from lockstep.models.heads import Head
from lockstep.models.objectives import ClassifierLoss, ModelLoss, SpanLoss, TargetLoss
from lockstep.models.preferences import DistillLoss, Log, PairLoss, RatedLoss, unlogged
from lockstep.models.torch_losses import TorchLoss, construct_objective, loss_module
from lockstep.plan.batch import smallest_micro_batch

if TYPE_CHECKING:
    from lockstep.core.records import Batch, DataFacts
    from lockstep.plan.plan import Plan

_PAIRED_BY = {kind: "classification" if kind == "reward" else "next-token" for kind in (*PAIRS, "kto")}
"""Kinds of objectives that a model must be made for, by objectives of pairs."""


def means(loss_sum: float, count: float, sums: Mapping[str, float]) -> dict[str, float]:
    """Return each sum divided by the number of valid targets."""
    return {name: value / count if count else float("nan") for name, value in {"loss": loss_sum, **sums}.items()}


@dataclass(frozen=True)
class FunctionObjective:
    """An objective made of functions.

    Attributes:
        count: Returns the number of valid targets in a batch.
        loss_sum: (outputs, batch) -> sum, not mean, of their losses, 0-dim.
        metric_sums: (outputs, batch) -> further 0-dim sums, by name.
        metrics: (loss_sum, count, sums) -> reported metrics, which include `loss`.
        decomposes: Whether a batch's loss is the sum of its samples' losses.
        from_companion: (outputs of the companion, batch) -> what the loss needs of them, which `batch.companion` gets.
    """

    count: Callable[[Batch], float]
    loss_sum: Callable[[Any, Batch], Tensor]
    metric_sums: Callable[[Any, Batch], Mapping[str, Tensor]] = lambda outputs, batch: {}
    metrics: Callable[[float, float, Mapping[str, float]], dict[str, float]] = means
    decomposes: bool = True
    from_companion: Callable[[Any, Batch], Any] = lambda outputs, batch: outputs


def build_objective(
    objective: schema.ObjectiveConfig,
    model: schema.Model,
    facts: DataFacts,
    head: Head | None = None,
    *,
    aligned: bool = False,
    log: Log = unlogged,
) -> EvaluatedObjective:
    """Return the configured objective, or the one that the model is made for.

    Args:
        head: The head of a model of the transformers library.
        aligned: Next-token targets are aligned with the input tokens and have to be shifted.
        log: Receives what an objective of pairs logs in each forward.

    Raises:
        ConfigError: The objective doesn't fit the model.
    """
    kind = objective_kind(objective, model, facts, head)
    if kind == "given":
        raise _problem("objective.kind", "`given` needs an objective from the Python API, but there is none")
    if objective.target is not None:
        return adapt_objective(construct_objective(objective.target, objective.arguments))
    if objective.arguments:
        raise _problem("objective.arguments", f"only `kind: custom` takes arguments, not {kind}; remove them")
    smoothing = objective.label_smoothing
    if kind == "distill":
        plain = objective.model_copy(update={"kind": "auto"})
        return _distilled(build_objective(plain, model, facts, head, aligned=aligned), objective)
    if kind == "kto":
        weights = objective.desirable_weight, objective.undesirable_weight
        return RatedLoss(beta=objective.beta or 0.1, weights=weights, shift=aligned, log=log)
    if kind in PAIRS:
        beta = objective.beta or {"simpo": 2.0, "reward": 1.0}.get(kind, 0.1)
        margin = objective.margin if kind == "simpo" else 0.0
        return PairLoss(kind, beta=beta, margin=margin, label_smoothing=smoothing, shift=aligned, log=log)
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
        reason = f"{smoothing:g} is for one class or token a target, but this objective is {kind!r}; remove it"
        raise _problem("objective.label_smoothing", reason)
    if kind == "question-answering":
        return SpanLoss()
    assert head is not None, "only models of the transformers library compute a loss"
    shift = head.labels == "next-token" and head.shifts
    return ModelLoss(head.labels, shift=shift, summed=head.summed, decomposes=head.by_samples)


def _distilled(targets: EvaluatedObjective, section: schema.ObjectiveConfig) -> DistillLoss:
    if isinstance(targets, ClassifierLoss):
        targets = TargetLoss(language=False)
    if not isinstance(targets, TargetLoss):
        raise _problem("objective.kind", "distill compares logits of classes or tokens, and these outputs are others")
    return DistillLoss(targets, temperature=section.temperature, soft=section.soft)


def repeats_inputs(batch: Batch) -> bool:
    """Return whether every valid target is the input token at its position, as in transformers' unshifted labels.

    Tokens that are all the same are no evidence, since shifted labels look alike.
    """
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
    """Return the objective for a user's object, from the Python API or a config.

    It is an object with `count` and `loss_sum`; a loss module or function of torch, called with (outputs,
    batch.targets); or a function (outputs, batch) -> sum of losses, with one target a sample.

    Raises:
        ConfigError: It is none of these, or the count that a loss of torch divides by is unknown.
    """
    if isinstance(objective, FunctionObjective | TargetLoss | TorchLoss):
        return objective
    if isinstance(objective, Objective) and not inspect.isclass(objective):
        optional = ("metric_sums", "metrics", "decomposes", "from_companion")
        members = {name: getattr(objective, name) for name in optional if getattr(objective, name, None) is not None}
        return FunctionObjective(objective.count, objective.loss_sum, **members)
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
    """Return why a batch's loss isn't the sum of its samples' losses, with the names of modules; None if it is."""
    whole = not module.training  # in evaluation: all of it will be trained
    norms = [at for at, child in module.named_modules() if isinstance(child, _BatchNorm) and child.training | whole]
    causes = [f"batch norm ({listed(norms, 3)})"] if norms else []
    if getattr(getattr(module, "config", None), "output_router_logits", False):  # a transformers mixture of experts
        causes.append("the experts' balancing loss (output_router_logits)")
    return " and ".join(causes) or None


def least_samples(module: nn.Module) -> int:
    """Return how many samples a micro-batch needs in training: 2 with batch norm that has one value of each.

    Batch norm of images and volumes has many, and of sequences, in models with 1-d convolutions.
    """
    children = [*module.modules()]
    has_sequences = any(isinstance(child, nn.Conv1d | nn.ConvTranspose1d) for child in children)
    norms = [child for child in children if isinstance(child, nn.BatchNorm1d) and child.training]
    return 2 if norms and not has_sequences else 1


def lone_samples(module: nn.Module, plan: Plan) -> list[str]:
    """Return a warning if batch norm gets a single sample in the last update of an epoch, where it may fail."""
    rest, batch = plan.epoch_samples % plan.batch.global_size, plan.batch
    if not rest or smallest_micro_batch(rest, batch.micro_size, batch.ranks) >= least_samples(module):
        return []
    return [
        f"The last update of an epoch has {rest:,} samples, so a rank has a micro-batch of one or none; batch norm "
        "fails on one value for each channel. Set data.drop_last: true, or another batch.global_size."
    ]


def objective_kind(objective: schema.ObjectiveConfig, model: schema.Model, facts: DataFacts, head: Head | None) -> str:
    """Return the kind of the objective: one of those in `objectives`, `custom` or `given`."""
    if objective.kind in ("custom", "given"):
        return objective.kind
    if isinstance(model, schema.CustomModel | schema.GivenModel) and head is None:
        return objective.kind if objective.kind != "auto" else _kind_of_data(facts)
    if isinstance(model, schema.HuggingFaceModel):
        made_for = TASKS[model.task].kind
    elif head is not None:
        made_for = head.labels
    else:
        made_for = "next-token" if isinstance(model, schema.TransformerModel) else "classification"
    if objective.kind == "distill" or made_for == _PAIRED_BY.get(objective.kind):
        return objective.kind
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
            f"{objective.kind!r} does not fit {what}, which is made for {made_for!r}; set `auto`, or a `custom` "
            "objective",
        )
    return made_for


def _kind_of_data(facts: DataFacts) -> str:
    if facts.classes is not None:
        return "classification"
    if facts.vocabulary is not None:
        return "next-token"
    raise _problem(
        "objective.kind",
        "neither the custom model nor the data (no classes, no tokens) determines the objective; set next-token, "
        "masked-lm, classification, seq2seq or custom",
    )


def _problem(key: str, message: str) -> ConfigError:
    return ConfigError(Problem("", key, message))
