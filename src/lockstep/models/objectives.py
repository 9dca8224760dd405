"""What a model is trained for: sums over valid targets, so that any split of the samples gives the same gradient.

    next-token             targets of every position    logits [B, T, V]    loss, perplexity, accuracy, bits_per_byte
    masked-lm              those of hidden positions    logits [B, T, V]    loss, perplexity, accuracy
    seq2seq                those of the target text     logits [B, T, V]    loss, perplexity, accuracy
    classification         one a sample                 logits [B, C]       loss, accuracy
    token-classification   one a position               logits [B, T, C]    loss, accuracy
    question-answering     where an answer lies         two of [B, T]       loss, accuracy
    model                  what the model's forward     loss                loss
                           wants as labels

The last three are of models of the transformers library, whose heads (`heads`) say what their labels are. A target of
-100 is none. Losses are computed in fp32, whatever the precision of the outputs.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.batchnorm import _BatchNorm  # the one class that all batch norms share

from lockstep.config import schema
from lockstep.core import protocols
from lockstep.core.errors import ConfigError, Problem, RunFailed
from lockstep.core.extensions import construct
from lockstep.core.records import Batch, DataFacts
from lockstep.distributed.shard_boxes import is_sharded
from lockstep.models.heads import Head
from lockstep.models.outputs import logits_of, part_of
from lockstep.models.vocab_parallel_loss import full_logits, vocab_parallel_cross_entropy_sum

IGNORED = -100
"""The target of a position that is to be no target: padding, a prompt."""


_OF_TASKS = {
    "causal-lm": "next-token",
    "speech-seq2seq": "seq2seq",
    "sequence-classification": "classification",
    "image-classification": "classification",
    "audio-classification": "classification",
    "ctc": "model",
}
"""Kinds of objectives by tasks of a transformers model; of others they have the same name."""


class NextTokenLoss:
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
        if batch.targets is None:
            raise _no_targets()
        return count_targets(batch.targets[:, 1:] if self._shift else batch.targets)

    def targets_of(self, batch: Batch) -> Tensor:
        """Of each position that has logits; -100 for none."""
        return F.pad(batch.targets[:, 1:], (0, 1), value=IGNORED) if self._shift else batch.targets

    def aligned(self) -> NextTokenLoss:
        """The same, of batches whose targets are what `targets_of` makes of them."""
        return NextTokenLoss(label_smoothing=self.label_smoothing, bytes_per_token=self._bytes_per_token)

    def loss_sum(self, outputs: object, batch: Batch) -> Tensor:
        return cross_entropy_sum(*self._aligned(outputs, batch), self.label_smoothing)

    def metric_sums(self, outputs: object, batch: Batch) -> Mapping[str, Tensor]:
        return _metric_sums(*self._aligned(outputs, batch), self.label_smoothing)

    def metrics(self, loss_sum: float, count: float, sums: Mapping[str, float]) -> dict[str, float]:
        return _language_metrics(loss_sum, count, sums, self._bytes_per_token)

    def _aligned(self, outputs: object, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = logits_of(outputs)
        return (logits[:, :-1], batch.targets[:, 1:]) if self._shift else (logits, batch.targets)


class TargetLoss:
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

    def aligned(self) -> TargetLoss:
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


class ClassifierLoss:
    """What a classifier of the transformers library is compared with: a class, several classes, or numbers.

    Which of them is what the library makes of it: `problem`, or else numbers if there is one output, a class if targets
    are integers, several classes if they aren't.

    Args:
        labels: outputs of the model for each sample.
        problem: `problem_type` of its config.
    """

    decomposes = True
    language = False

    def __init__(self, labels: int, problem: str | None, label_smoothing: float = 0.0) -> None:
        self._labels = labels
        self._problem = problem
        self.label_smoothing = label_smoothing

    def count(self, batch: Batch) -> int:
        if self._kind(batch.targets) == "single_label_classification":
            return count_targets(batch.targets)
        return batch.samples

    def loss_sum(self, outputs: object, batch: Batch) -> Tensor:
        logits, targets = logits_of(outputs), batch.targets
        kind = self._kind(targets)
        if kind == "single_label_classification":
            return cross_entropy_sum(logits, _one_a_sample(targets), self.label_smoothing)
        logits = full_logits(logits).float()
        if targets.numel() != logits.numel():
            raise RunFailed(f"outputs are {list(logits.shape)} and targets {list(targets.shape)}, for {kind}")
        targets = targets.reshape(logits.shape).to(logits.dtype)
        if kind == "regression":
            return F.mse_loss(logits, targets, reduction="sum") / self._labels
        return F.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / self._labels

    def metric_sums(self, outputs: object, batch: Batch) -> Mapping[str, Tensor]:
        logits, targets = full_logits(logits_of(outputs)), batch.targets
        match self._kind(targets):
            case "single_label_classification":
                return _metric_sums(logits, _one_a_sample(targets), self.label_smoothing)
            case "multi_label_classification":
                return {"right": ((logits > 0) == (targets > 0.5)).sum() / self._labels}
        return {}

    def metrics(self, loss_sum: float, count: float, sums: Mapping[str, float]) -> dict[str, float]:
        accuracy = {"accuracy": _mean(sums["right"], count)} if "right" in sums else {}
        return {"loss": _mean(loss_sum, count), **accuracy}

    def _kind(self, targets: Tensor | None) -> str:
        if targets is None:
            raise _no_targets()
        if self._problem is not None:
            kind = self._problem
        elif self._labels == 1:
            kind = "regression"
        else:
            classes = not targets.is_floating_point()
            kind = "single_label_classification" if classes else "multi_label_classification"
        if self.label_smoothing and kind != "single_label_classification":
            why = f"{self.label_smoothing:g} is for one class a sample, and this is {kind}; leave it out"
            raise _problem("objective.label_smoothing", why)
        return kind


class SpanLoss:
    """Where an answer begins and ends: `start_positions` and `end_positions` [samples] among the inputs. One that lies
    behind the sequence is none."""

    decomposes = True
    language = False

    def count(self, batch: Batch) -> int:
        start, end = self._positions(batch)
        length = _length(batch)
        return int((start < length).sum() + (end < length).sum())

    def loss_sum(self, outputs: object, batch: Batch) -> Tensor:
        start, end = self._positions(batch)
        found = ((part_of(outputs, "start_logits"), start), (part_of(outputs, "end_logits"), end))
        first, second = (cross_entropy_sum(logits, _within(places, logits.shape[1])) for logits, places in found)
        return first + second

    def metric_sums(self, outputs: object, batch: Batch) -> Mapping[str, Tensor]:
        start, end = self._positions(batch)
        right = (part_of(outputs, "start_logits").argmax(-1) == start).sum()
        return {"right": right + (part_of(outputs, "end_logits").argmax(-1) == end).sum()}

    def metrics(self, loss_sum: float, count: float, sums: Mapping[str, float]) -> dict[str, float]:
        return {"loss": _mean(loss_sum, count), "accuracy": _mean(sums["right"], count)}

    def _positions(self, batch: Batch) -> tuple[Tensor, Tensor]:
        inputs = batch.inputs if isinstance(batch.inputs, Mapping) else {}
        if not {"start_positions", "end_positions"} <= set(inputs):
            keys = ", ".join(inputs) or "none"
            raise RunFailed(
                f"the inputs of a batch are {keys}; question answering needs start_positions and end_positions"
            )
        return inputs["start_positions"].reshape(-1).clamp(min=0), inputs["end_positions"].reshape(-1).clamp(min=0)


class ModelLoss:
    """The loss that the model's own forward computes of the labels it is given.

    Args:
        labels: what the labels are: the loss is a mean over those that count. Of an unknown head, a mean over samples.
        summed: it is the sum over the samples instead.
        decomposes: whether the loss of a batch is that of its samples.
    """

    language = False

    def __init__(self, labels: str, *, shift: bool, summed: bool, decomposes: bool) -> None:
        self._labels = labels
        self._shift = shift
        self._summed = summed
        self.decomposes = decomposes

    def count(self, batch: Batch) -> int:
        return int(self._valid(batch))

    def loss_sum(self, outputs: object, batch: Batch) -> Tensor:
        loss = part_of(outputs, "loss").float()
        return loss.sum() if self._summed else loss.mean() * self._valid(batch)

    def metric_sums(self, outputs: object, batch: Batch) -> Mapping[str, Tensor]:
        return {}

    def metrics(self, loss_sum: float, count: float, sums: Mapping[str, float]) -> dict[str, float]:
        return {"loss": _mean(loss_sum, count)}

    def _valid(self, batch: Batch) -> int | Tensor:
        if self._labels not in ("next-token", "masked-lm", "seq2seq", "token-classification"):
            return batch.samples
        if batch.targets is None:
            raise _no_targets()
        targets = batch.targets[:, 1:] if self._shift else batch.targets
        return count_targets(targets) if targets.is_cpu else (targets != IGNORED).sum()


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


def build_objective(
    objective: schema.ObjectiveConfig,
    model: schema.Model,
    facts: DataFacts,
    head: Head | None = None,
    *,
    aligned: bool = False,
) -> protocols.Objective:
    """The objective that was asked for, or the one that the model is made for.

    Args:
        head: of a model of the transformers library, however it came.
        aligned: of next-token: targets are aligned with the input tokens, and are shifted here; otherwise they are
            the next tokens already.

    Raises:
        ConfigError: it doesn't fit the model.
    """
    if objective.kind == "given":
        raise _problem("objective.kind", "`given` takes an objective handed over in Python, and none was")
    if objective.kind == "custom":
        assert objective.target is not None
        return adapt_objective(construct("objectives", objective.target, objective.arguments))
    kind = _kind(objective, model, facts, head)
    if objective.arguments:
        raise _problem("objective.arguments", f"these belong to `kind: custom`; {kind} takes none")
    smoothing = objective.label_smoothing
    match kind:
        case "next-token":
            return NextTokenLoss(shift=aligned, label_smoothing=smoothing, bytes_per_token=facts.bytes_per_token)
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
    assert head is not None, "the loss of a model is that of one of the transformers library"
    return _model_loss(head)


def _model_loss(head: Head) -> ModelLoss:
    shift = head.labels == "next-token" and head.shifts
    return ModelLoss(head.labels, shift=shift, summed=head.summed, decomposes=head.by_samples)


def repeats_inputs(batch: Batch) -> bool:
    """Whether every valid target is the input token at its own position: labels as the transformers library has them,
    to be shifted. Tokens that could be either, since all are the same, are no evidence."""
    targets = batch.targets
    if not isinstance(targets, Tensor) or targets.dim() != 2 or targets.is_floating_point():
        return False
    values = batch.inputs.values() if isinstance(batch.inputs, Mapping) else batch.inputs
    for tokens in values:
        if not isinstance(tokens, Tensor) or tokens.shape != targets.shape or tokens.is_floating_point():
            continue
        valid = targets != IGNORED
        if not bool(valid.any()) or not bool((tokens == targets)[valid].all()):
            continue
        shifted = valid[:, :-1]
        return not bool((tokens[:, 1:] == targets[:, :-1])[shifted].all())
    return False


def adapt_objective(objective: object) -> protocols.Objective:
    """An objective from what a user gives through the Python API or names in a config.

    Args:
        objective: one with `count` and `loss_sum`; a loss module of torch with `reduction="sum"`, called with
            (outputs, batch.targets); or a function (outputs, batch) -> sum of losses, with one target a sample.

    Raises:
        ConfigError: none of these, or a loss module that takes the mean.
    """
    if isinstance(objective, FunctionObjective | NextTokenLoss | TargetLoss):
        return objective
    if isinstance(objective, CountsAndLosses) and not inspect.isclass(objective):
        given = ("metric_sums", "metrics", "decomposes")
        optional = {name: getattr(objective, name) for name in given if getattr(objective, name, None) is not None}
        return FunctionObjective(objective.count, objective.loss_sum, **optional)
    if isinstance(objective, nn.modules.loss._Loss):
        return _from_loss_module(objective)
    if inspect.isfunction(objective) and objective.__module__ == "torch.nn.functional":
        raise ConfigError(
            f"torch.nn.functional.{objective.__name__} returns a mean and takes targets, not a batch; give the loss "
            'module of torch.nn with reduction="sum", or a function (outputs, batch) -> sum of losses'
        )
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


def count_targets(targets: Tensor | None) -> int:
    """How many are not -100. NumPy counts 4,096 of them in 3 us, torch in 8."""
    if targets is None:
        raise _no_targets()
    if targets.is_floating_point():
        raise RunFailed(f"targets are {targets.dtype}; the built-in objectives take class or token numbers (int64)")
    if targets.is_cpu:
        return int(np.count_nonzero(targets.numpy() != IGNORED))
    return int((targets != IGNORED).sum())


def cross_entropy_sum(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Sum over valid targets; fp32, 0-dim. logits [..., V], targets [...].

    With label smoothing e, each target's loss is (1 - e) x its own + e x the mean over all tokens (Szegedy et al. 2016,
    arXiv:1512.00567, section 7), which is a sum over targets all the same.
    """
    if logits.shape[:-1] != targets.shape:
        raise RunFailed(
            f"outputs are {list(logits.shape)} and targets {list(targets.shape)}; one target an output is needed"
        )
    if is_sharded(logits):
        return vocab_parallel_cross_entropy_sum(logits, targets, label_smoothing, IGNORED)
    if logits.dim() > 2:
        logits, targets = logits.flatten(0, -2), targets.flatten()
    if logits.dtype is not torch.float32:
        logits = logits.float()
    try:
        return F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED, label_smoothing=label_smoothing)
    except IndexError as error:
        valid = targets[targets != IGNORED]
        found = f"{valid.min()} to {valid.max()}"
        raise RunFailed(
            f"targets are {found}, and the model has {logits.shape[-1]} outputs, 0 to {logits.shape[-1] - 1}"
        ) from error


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
        loss_sum=partial(_loss_of_module, loss),
    )


def _loss_of_module(loss: nn.modules.loss._Loss, outputs: object, batch: Batch) -> Tensor:
    """Raises ConfigError: torch would fail, or silently repeat outputs or targets until they fit each other."""
    made, targets = logits_of(outputs).float(), batch.targets
    if targets is None:
        raise _no_targets()
    remedy = None
    if isinstance(loss, _OF_CLASSES) and not targets.is_floating_point():
        remedy = _remedy_of_classes(list(made.shape), list(targets.shape))
    elif isinstance(loss, _OF_PAIRS) and made.shape != targets.shape:
        remedy = f"give targets of {list(made.shape)}, or have the forward return outputs of {list(targets.shape)}"
    if remedy is not None:
        shapes = f"outputs are {list(made.shape)} and targets {list(targets.shape)}"
        raise _problem("objective", f"{type(loss).__name__}: {shapes}; {remedy}")
    found: Tensor = loss(made, targets)
    return found


_OF_CLASSES = nn.CrossEntropyLoss | nn.NLLLoss
_OF_PAIRS = (
    nn.MSELoss | nn.L1Loss | nn.SmoothL1Loss | nn.HuberLoss | nn.BCELoss | nn.BCEWithLogitsLoss | nn.SoftMarginLoss
)
"""Of each output and the target at its place."""


def _remedy_of_classes(made: list[int], targets: list[int]) -> str | None:
    """What to do about shapes that torch's losses of classes don't take; None: it takes them."""
    if len(made) < 2 or targets == [made[0], *made[2:]]:
        return None
    if targets == made[:-1]:
        return (
            "torch takes classes in the second dim, and here they are in the last. In place of the loss write "
            "objective: {kind: next-token} in the config, or masked-lm for labels at their own positions; or have the "
            f"forward return outputs.movedim(-1, 1), {[made[0], made[-1], *made[1:-1]]}"
        )
    wanted = [made[0], *made[2:]]
    return f"torch takes classes in the second dim and one target for each of the others: give targets of {wanted}"


def _kind(objective: schema.ObjectiveConfig, model: schema.Model, facts: DataFacts, head: Head | None) -> str:
    """Raises:
    ConfigError: asked for something that the model can't do.
    """
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
        return _OF_TASKS.get(model.task, model.task)
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


def _metric_sums(logits: Tensor, targets: Tensor, label_smoothing: float) -> dict[str, Tensor]:
    """Right answers; under label smoothing also the plain loss, which perplexity and bits per byte are made of. Divided
    logits are put together for it."""
    logits = full_logits(logits)
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
        "perplexity": math.inf if nats >= 700 else math.exp(nats),
        "accuracy": _mean(sums["right"], count),
    }
    if bytes_per_token is not None:
        metrics["bits_per_byte"] = nats / math.log(2) / bytes_per_token
    return metrics


def _one_a_sample(targets: Tensor) -> Tensor:
    """[samples] of [samples] or [samples, 1], which transformers takes, too."""
    return targets.flatten() if targets.dim() == 2 and targets.shape[1] == 1 else targets


def _within(places: Tensor, length: int) -> Tensor:
    """Places as targets; those behind the sequence are none."""
    return places.masked_fill(places >= length, IGNORED)


def _length(batch: Batch) -> int:
    """Of the sequences in which answers lie."""
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(batch.inputs, Mapping) and isinstance(batch.inputs.get(name), Tensor):
            length: int = batch.inputs[name].shape[1]
            return length
    raise RunFailed("the inputs of a batch have no input_ids; question answering needs them")


def _no_targets() -> RunFailed:
    return RunFailed(
        "a batch has no targets, and this objective needs them: give items the key `labels` (or label, targets, "
        "target); those of a causal language model are a copy of input_ids, -100 where there is padding"
    )


def _mean(total: float, count: float) -> float:
    return total / count if count else math.nan


def _describe(thing: object) -> str:
    return f"the class {thing.__name__}, not an object of it" if inspect.isclass(thing) else f"a {type(thing).__name__}"


def _first(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def _problem(key: str, message: str) -> ConfigError:
    return ConfigError(Problem("", key, message))
