"""Metrics of torchmetrics on an evaluation set, exact over all ranks.

outputs, batch --> probabilities and classes, or numbers, of valid targets --> `update` on the rank that has the outputs
at the end     --> sums added, lists and other states gathered, of ranks that have any --> `compute`, on every rank

Its class defines a metric; the objective defines outputs and targets, so that `task` and `num_classes` follow from the
run. torchmetrics' own way over ranks isn't used: it hangs if ranks have lists of other lengths, and counts states of
ranks without samples.
"""

from __future__ import annotations

import importlib
import inspect
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.core.directions import Direction
from lockstep.core.distribution import pip_install
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.metric_names import metric_classes, metric_names, plain
from lockstep.core.records import IGNORED
from lockstep.models.objectives import ClassifierLoss, ModelLoss, SpanLoss, TargetLoss
from lockstep.models.outputs import logits_of
from lockstep.models.preferences import DistillLoss, PairLoss, RatedLoss
from lockstep.models.vocab_parallel_loss import full_logits

if TYPE_CHECKING:
    from lockstep.config.schema import Metric
    from lockstep.core.protocols import Axis, EvaluatedObjective
    from lockstep.core.records import Batch

CLASSES, LABELS, NUMBERS, TEXTS, OWN = "classes", "several labels", "numbers", "texts", "own"
"""Kinds of targets: a class each, several labels a sample, numbers, texts, or known only to the user's objective."""
_SHOWN = 8  # classes in a trial
_TEXTS = ["a text of five words"] * 2
_ROUGE = ("rouge1", "rouge2", "rougeL")  # rougeLsum splits sentences by data that nltk downloads
_SEVERAL = ("BLEUScore", "SacreBLEUScore", "CHRFScore", "TranslationEditRate", "ExtendedEditDistance")
"""Classes with a list of references for each text."""


@dataclass(frozen=True)
class Outcome:
    """The kind of a run's targets, and how many classes, labels or numbers there are."""

    kind: str
    size: int | None


def outcome_of(objective: EvaluatedObjective, batch: Batch, size: int | None) -> Outcome:
    """Return what an objective's targets are. Raises ConfigError if it has no outputs for a metric.

    Args:
        batch: Of the data.
        size: Number of classes, tokens or outputs, if it is known.
    """
    if isinstance(objective, TargetLoss):
        return Outcome(CLASSES, size)
    if isinstance(objective, ClassifierLoss):
        kinds = {"regression": NUMBERS, "multi_label_classification": LABELS}
        return Outcome(kinds.get(objective.kind_of(batch.targets), CLASSES), objective.labels)
    if isinstance(objective, SpanLoss | ModelLoss | PairLoss | RatedLoss | DistillLoss):
        why = "the objective has no outputs with a target each, but pairs, spans, or a loss of the model; leave it out"
        raise ConfigError(Problem("", "evaluation.metrics", why))
    return Outcome(OWN, size)


class _AllSums(defaultdict[str, float]):
    """Sums that have every name: which ones an objective will have is known when it has evaluated."""

    def __contains__(self, name: object) -> bool:
        return True


def own_metrics(objective: EvaluatedObjective) -> list[str] | None:
    """Return the names of an objective's own metrics; None if a user's objective needs more to show them."""
    try:
        return list(objective.metrics(1.0, 1.0, _AllSums(lambda: 1.0)))
    except Exception:
        return None


class EvaluationMetrics:
    """The metrics of a run, on outputs or on texts; without any, it does nothing.

    Attributes:
        names: Of the values; empty if they depend on the outputs of the user's model.
        directions: Which values are best by torchmetrics, by the configured name.
    """

    def __init__(self, sections: Sequence[Metric], outcome: Outcome, device: torch.device) -> None:
        self._outcome = outcome
        self._metrics = {section.title: _built(section, outcome).to(device) for section in sections}
        self.directions = {name: direction_of(metric) for name, metric in self._metrics.items()}
        self.names: list[str] = []
        if outcome.kind == TEXTS or (outcome.size is not None and outcome.kind != OWN):
            self._try(outcome.size or 1)

    def _try(self, many: int) -> None:
        """Compute each once, of made up outputs: arguments that don't fit are refused before the training."""
        rows = min(many, _SHOWN) + 2
        outputs: Any = torch.rand(rows, many, generator=torch.Generator().manual_seed(0))
        targets: Any = torch.arange(rows) % many
        if self._outcome.kind == TEXTS:
            outputs = targets = _TEXTS
        elif self._outcome.kind == LABELS:
            targets = (torch.arange(rows)[:, None] + torch.arange(many)) % 2
        elif self._outcome.kind == NUMBERS:
            targets = outputs.flip(0) + 0.5
        else:
            outputs = outputs / outputs.sum(1, keepdim=True)
        for name, metric in self._metrics.items():
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    trial = (outputs, targets)
                    self._add(metric, *(x.to(metric.device) if isinstance(x, Tensor) else x for x in trial))
                    self.names += numbers_of(name, metric.compute())
            except Exception as error:  # of many kinds, such as ValueError for an argument
                raise _refused(name, f"{type(metric).__name__}: {error}") from error
            metric.reset()

    def reset(self) -> None:
        """Forget what an evaluation that was stopped has left."""
        for metric in self._metrics.values():
            metric.reset()

    @torch.no_grad()
    def update(self, objective: EvaluatedObjective, outputs: object, batch: Batch) -> None:
        """Add a batch's samples. All tensor-parallel ranks together: logits that are sharded are gathered."""
        if not self._metrics:
            return
        predictions, targets = _pairs(objective, self._outcome, full_logits(logits_of(outputs)), batch)
        if batch.samples and targets.numel():
            self.add(predictions, targets)

    def add(self, predictions: Any, targets: Any) -> None:
        """Add probabilities and classes, numbers, or texts and what they should be."""
        for metric in self._metrics.values():
            self._add(metric, predictions, targets)

    def _add(self, metric: Any, predictions: Any, targets: Any) -> None:
        name = type(metric).__name__
        if self._outcome.kind == CLASSES and name.startswith("Binary"):
            predictions = predictions[:, 1]
        elif self._outcome.kind == NUMBERS and self._outcome.size == 1:
            predictions, targets = predictions.flatten(), targets.flatten()
        elif name == "SQuAD":
            predictions = [{"prediction_text": text, "id": str(number)} for number, text in enumerate(predictions)]
            answers = [{"text": [text], "answer_start": [0]} for text in targets]
            targets = [{"answers": answer, "id": str(number)} for number, answer in enumerate(answers)]
        elif name in _SEVERAL:
            targets = [[text] for text in targets]
        if name != "MeanMetric":
            metric.update(predictions, targets)
            return
        equal = [text.strip() == wanted.strip() for text, wanted in zip(predictions, targets, strict=True)]
        metric.update(torch.tensor(equal, dtype=torch.float64))

    def values(self, axis: Axis, *, counts: bool) -> tuple[dict[str, float], list[str]]:
        """Return the values over all ranks, and why others can't be computed; then start again. All ranks together.

        Args:
            counts: Whether this rank's samples count; those of its tensor-parallel peers are the same.
        """
        if not self._metrics:
            return {}, []
        reduce_states(list(self._metrics.values()), axis, counts=counts)
        values: dict[str, float] = {}
        failures: list[str] = []
        for name, metric in self._metrics.items():
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # a class without samples counts as 0, and so on
                    values |= numbers_of(name, metric.compute())
            except Exception as error:  # on all ranks alike
                failures.append(f"{name}: {type(error).__name__}: {error}")
            metric.reset()
        return values, failures


def _built(section: Metric, outcome: Outcome) -> Any:
    """Return the metric of a section, with the run's values for arguments that aren't given."""
    name = metric_names().get(plain(section.kind))
    if name is None:
        raise _refused(section.kind, f"it needs the package torchmetrics: {pip_install('metrics')}")
    part = metric_classes()[name]
    if outcome.kind == TEXTS and name == "ExactMatch":
        part, name = "aggregation", "MeanMetric"  # of texts that are equal
    elif part != {NUMBERS: "regression", TEXTS: "text", OWN: part}.get(outcome.kind, "classification"):
        remedy = "; for texts, write it in evaluation.generate.metrics" * (part == "text")
        raise _refused(section.kind, f"{name} is a metric of {part}, and the targets are {outcome.kind}{remedy}")
    kind = getattr(importlib.import_module(f"torchmetrics.{part}"), name)
    accepted = {*inspect.signature(kind.__init__).parameters, *inspect.signature(kind.__new__).parameters}
    arguments = {"sync_on_compute": False, **_arguments(outcome, accepted), **section.arguments}
    try:
        return kind(**arguments)
    except Exception as error:  # of many kinds
        needs = "; give it in its arguments" if outcome.size is None else ""
        raise _refused(section.kind, f"{name}: {error}{needs}") from error


def _arguments(outcome: Outcome, accepted: Iterable[str]) -> dict[str, Any]:
    if outcome.kind in (OWN, TEXTS):
        return {"rouge_keys": _ROUGE} if "rouge_keys" in accepted else {}
    task = {CLASSES: "binary" if outcome.size == 2 else "multiclass", LABELS: "multilabel"}.get(outcome.kind)
    sizes = {CLASSES: "num_classes", LABELS: "num_labels", NUMBERS: "num_outputs"}
    known = {"task": task, sizes[outcome.kind]: outcome.size}
    return {name: value for name, value in known.items() if name in accepted and value is not None}


def _pairs(objective: EvaluatedObjective, outcome: Outcome, outputs: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
    """Return what the metrics get: probabilities [N, classes] and classes [N], or numbers, of the valid targets."""
    if outcome.kind == OWN:
        return outputs.detach(), batch.targets
    outputs, targets = outputs.float(), batch.targets
    if isinstance(objective, TargetLoss):
        targets = objective.targets_of(batch)
    if outcome.kind == CLASSES:
        outputs, targets = outputs.flatten(0, -2), targets.flatten()
        valid = targets != IGNORED
        return torch.softmax(outputs[valid], dim=-1), targets[valid].long()
    targets = targets.reshape(outputs.shape)
    return (outputs, targets.float()) if outcome.kind == NUMBERS else (torch.sigmoid(outputs), targets.long())


def numbers_of(name: str, value: object) -> dict[str, float]:
    """Return the numbers of a metric's value: one, one for each class, or several by name."""
    if isinstance(value, Mapping):
        parts = [(key if str(key).startswith(name) else f"{name}_{key}", part) for key, part in value.items()]
        return {inner: number for key, part in parts for inner, number in numbers_of(key, part).items()}
    if isinstance(value, Tensor) and value.numel() == 1:
        return {name: float(value)}
    if isinstance(value, Tensor) and value.dim() == 1:
        return {f"{name}_{number}": float(part) for number, part in enumerate(value)}
    raise ValueError("its value is a table or a curve, and an evaluation reports numbers")


def direction_of(metric: Any) -> Direction | None:
    """Return which values of a metric are best."""
    better = metric.higher_is_better
    return None if better is None else "highest" if better else "lowest"


def reduce_states(metrics: Sequence[Any], axis: Axis, *, counts: bool) -> None:
    """Give each metric the state of all ranks' samples. All ranks together."""
    own = [_exchanged(metric) if counts and metric.update_called else None for metric in metrics]
    of_ranks: list[Any] = axis.gather(own)
    for number, metric in enumerate(metrics):
        parts = [part for of_rank in of_ranks if (part := of_rank[number]) is not None]
        for name, reduction in metric._reductions.items() if parts else ():
            values = [part[name] for part in parts]
            if isinstance(values[0], _Summed):
                mine = getattr(metric, name) if own[number] is not None else values[0].zeros(metric.device)
                state: Any = axis.sum(mine.clone()).cpu()
            elif isinstance(values[0], list):
                state = [item for of_rank in values for item in of_rank]
            elif len(values) == 1:
                state = values[0]
            else:  # the class joins them in `compute`, if it has no function for it
                state = torch.stack(values) if reduction is None else reduction(torch.stack(values))
            setattr(metric, name, state.to(metric.device) if isinstance(state, Tensor) else state)
        metric._computed = None
        metric._update_count = len(parts)


@dataclass(frozen=True, slots=True)
class _Summed:
    """Stands for a state that is summed in place: its shape may be another one than at the start."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def zeros(self, device: torch.device) -> Tensor:
        return torch.zeros(self.shape, dtype=self.dtype, device=device)


def _exchanged(metric: Any) -> dict[str, Any]:
    states: dict[str, Any] = {}
    for name, reduction in metric._reductions.items():
        value = getattr(metric, name)
        if isinstance(value, list):
            states[name] = [item.cpu() if isinstance(item, Tensor) else item for item in value]
        elif getattr(reduction, "__name__", "") == "dim_zero_sum":
            states[name] = _Summed(tuple(value.shape), value.dtype)
        else:
            states[name] = value.cpu()
    return states


def _refused(kind: str, why: str) -> ConfigError:
    return ConfigError(Problem("", "evaluation.metrics", f"{kind}: {why}"))
