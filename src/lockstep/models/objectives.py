"""The built-in objectives: sums over valid targets, so that any split of the samples gives the same gradient.

    kind                   targets                      outputs             metrics
    next-token             the next token               logits [B, T, V]    loss, perplexity, accuracy, bits_per_byte
    masked-lm, seq2seq     tokens                       logits [B, T, V]    loss, perplexity, accuracy
    classification         one per sample               logits [B, C]       loss, accuracy
    token-classification   one per position             logits [B, T, C]    loss, accuracy
    question-answering     start and end of answers     two of [B, T]       loss, accuracy
    model                  labels of the forward        loss                loss

Targets of -100 are ignored. Losses are computed in fp32 for outputs of any precision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional as F

from lockstep.core.errors import ConfigError, Problem, RunFailed
from lockstep.core.records import IGNORED, Batch
from lockstep.distributed.shard_boxes import is_sharded
from lockstep.models.outputs import logits_of, loss_of, part_of
from lockstep.models.torch_losses import no_targets, out_of_range, tensor_targets
from lockstep.models.vocab_parallel_loss import full_logits, vocab_parallel_cross_entropy_sum

_FEW = 64  # targets


OF_USERS_MODEL = "targets"
"""The kind of the labels of a user's model that takes targets, and computes the loss."""


def loss_and_accuracy(loss_sum: float, count: float, sums: Mapping[str, float]) -> dict[str, float]:
    """Return the metrics of an objective: the mean loss, and the share of right answers if they were counted."""
    accuracy = {"accuracy": _mean(sums["right"], count)} if "right" in sums else {}
    return {"loss": _mean(loss_sum, count), **accuracy}


class TargetLoss:
    """Cross-entropy with a target for each position that has logits, or for each sample.

    Args:
        language: Targets are tokens, and metrics contain the perplexity.
        shift: Targets are aligned with the input tokens, so that the logits of position t belong to target t + 1.
        bytes_per_token: Mean length of a token's text; None if unknown.
    """

    decomposes = True

    def __init__(
        self, *, language: bool, shift: bool = False, label_smoothing: float = 0.0, bytes_per_token: float | None = None
    ) -> None:
        self.language = language
        self.label_smoothing = label_smoothing
        self._shift = shift
        self._bytes_per_token = bytes_per_token

    def count(self, batch: Batch) -> int:
        targets = tensor_targets(batch)
        return count_targets(targets[:, 1:] if self._shift else targets)

    def targets_of(self, batch: Batch) -> Tensor:
        """Return the target of each position that has logits; -100 for none."""
        targets: Tensor = batch.targets
        return F.pad(targets[:, 1:], (0, 1), value=IGNORED) if self._shift else targets

    def aligned(self) -> TargetLoss:
        """Return the same objective for batches with the targets of `targets_of`."""
        return TargetLoss(
            language=self.language, label_smoothing=self.label_smoothing, bytes_per_token=self._bytes_per_token
        )

    def loss_sum(self, outputs: object, batch: Batch) -> Tensor:
        return cross_entropy_sum(*self._pairs(outputs, batch), self.label_smoothing)

    def metric_sums(self, outputs: object, batch: Batch) -> Mapping[str, Tensor]:
        return _metric_sums(*self._pairs(outputs, batch), self.label_smoothing)

    def metrics(self, loss_sum: float, count: float, sums: Mapping[str, float]) -> dict[str, float]:
        metrics = loss_and_accuracy(loss_sum, count, sums)
        if not self.language:
            return metrics
        nats = _mean(sums.get("plain_loss", loss_sum), count)
        metrics = {"loss": metrics["loss"], "perplexity": math.inf if nats >= 700 else math.exp(nats), **metrics}
        if self._bytes_per_token is not None:
            metrics["bits_per_byte"] = nats / math.log(2) / self._bytes_per_token
        return metrics

    def _pairs(self, outputs: object, batch: Batch) -> tuple[Tensor, Tensor]:
        return logits_of(outputs), self.targets_of(batch)  # logits[:, :-1] would be copied to be flattened


class ClassifierLoss:
    """The loss of a transformers classifier, with one class, several classes, or numbers as targets.

    The kind follows the library's rule: `problem_type` of its config if it is set, otherwise numbers if there is one
    output, a class if targets are integers, and several classes if they are floats.
    """

    decomposes = True
    metrics = staticmethod(loss_and_accuracy)

    def __init__(self, labels: int, problem: str | None, label_smoothing: float = 0.0) -> None:
        self.labels = labels
        self._problem = problem
        self.label_smoothing = label_smoothing

    def count(self, batch: Batch) -> int:
        if self.kind_of(tensor_targets(batch)) == "single_label_classification":
            return count_targets(batch.targets)
        return batch.samples

    def loss_sum(self, outputs: object, batch: Batch) -> Tensor:
        logits, targets = logits_of(outputs), batch.targets
        kind = self.kind_of(targets)
        if kind == "single_label_classification":
            return cross_entropy_sum(logits, _without_last_dim(targets), self.label_smoothing)
        logits = full_logits(logits).float()
        if targets.numel() != logits.numel():
            raise RunFailed(f"outputs are {list(logits.shape)} and targets {list(targets.shape)}, for {kind}")
        targets = targets.reshape(logits.shape).to(logits.dtype)
        loss = F.mse_loss if kind == "regression" else F.binary_cross_entropy_with_logits
        return loss(logits, targets, reduction="sum") / self.labels

    def metric_sums(self, outputs: object, batch: Batch) -> Mapping[str, Tensor]:
        logits, targets = full_logits(logits_of(outputs)), batch.targets
        match self.kind_of(targets):
            case "single_label_classification":
                return _metric_sums(logits, _without_last_dim(targets), self.label_smoothing)
            case "multi_label_classification":
                return {"right": ((logits > 0) == (targets > 0.5)).sum() / self.labels}
        return {}

    def kind_of(self, targets: Tensor | None) -> str:
        """Return the library's `problem_type` of these targets."""
        if targets is None:
            raise no_targets()
        if self._problem is not None:
            kind = self._problem
        elif self.labels == 1:
            kind = "regression"
        else:
            kind = f"{'multi' if targets.is_floating_point() else 'single'}_label_classification"
        if self.label_smoothing and kind != "single_label_classification":
            reason = f"{self.label_smoothing:g} is for one class a sample, but this is {kind}; remove it"
            raise ConfigError(Problem("", "objective.label_smoothing", reason))
        return kind


class SpanLoss:
    """The loss of the `start_positions` and `end_positions` [samples] of answers, which are among the inputs.

    Positions beyond the sequence are ignored.
    """

    decomposes = True
    metrics = staticmethod(loss_and_accuracy)

    def count(self, batch: Batch) -> int:
        inputs = batch.inputs if isinstance(batch.inputs, Mapping) else {}
        sequence = next((inputs[name] for name in ("input_ids", "inputs_embeds") if name in inputs), None)
        if not isinstance(sequence, Tensor):
            raise RunFailed("the inputs of a batch have no input_ids; question answering needs them")
        length = sequence.shape[1]
        return sum(int((positions < length).sum()) for positions in _spans(batch))

    def loss_sum(self, outputs: object, batch: Batch) -> Tensor:
        logits = part_of(outputs, "start_logits"), part_of(outputs, "end_logits")
        start, end = (
            cross_entropy_sum(scores, positions.masked_fill(positions >= scores.shape[1], IGNORED))
            for scores, positions in zip(logits, _spans(batch), strict=True)
        )
        return start + end

    def metric_sums(self, outputs: object, batch: Batch) -> Mapping[str, Tensor]:
        start, end = _spans(batch)
        right_starts = (part_of(outputs, "start_logits").argmax(-1) == start).sum()
        return {"right": right_starts + (part_of(outputs, "end_logits").argmax(-1) == end).sum()}


class ModelLoss:
    """The loss that the model's forward computes from labels.

    Args:
        labels: Kind of the labels: the loss is a mean over valid ones; for an unknown head, over samples.
        summed: The loss is the sum over the samples instead.
        decomposes: Whether the loss of a batch is the sum of its samples' losses.
    """

    metrics = staticmethod(loss_and_accuracy)

    def __init__(self, labels: str, *, shift: bool, summed: bool, decomposes: bool) -> None:
        self._labels = labels
        self._shift = shift
        self._summed = summed
        self.decomposes = decomposes

    def count(self, batch: Batch) -> int:
        return int(self._valid(batch))

    def loss_sum(self, outputs: object, batch: Batch) -> Tensor:
        loss = loss_of(outputs).float()
        return loss.sum() if self._summed else loss.mean() * self._valid(batch)

    def metric_sums(self, outputs: object, batch: Batch) -> Mapping[str, Tensor]:
        return {}

    def _valid(self, batch: Batch) -> int | Tensor:
        if self._labels == OF_USERS_MODEL and _are_tokens(batch.targets):
            valid = batch.targets >= 0  # -1 and -100 are what models ignore
            return int(valid.sum()) if valid.is_cpu else valid.sum()
        if self._labels not in ("next-token", "masked-lm", "seq2seq", "token-classification"):
            return batch.samples
        if batch.targets is None:
            raise no_targets()
        targets = batch.targets[:, 1:] if self._shift else batch.targets
        return count_targets(targets) if targets.is_cpu else (targets != IGNORED).sum()


def _are_tokens(targets: object) -> bool:
    return isinstance(targets, Tensor) and targets.dim() > 1 and not targets.is_floating_point()


def count_targets(targets: Tensor | None) -> int:
    """Return the number of targets other than -100. Python counts 8 in 1 us, torch in 20."""
    if targets is None:
        raise no_targets()
    if targets.is_floating_point():
        raise RunFailed(f"targets are {targets.dtype}; convert them to class or token numbers (int64)")
    if targets.dim() == 1 and targets.is_cpu and targets.numel() <= _FEW:
        return targets.numel() - targets.tolist().count(IGNORED)
    return int((targets != IGNORED).sum())


def cross_entropy_sum(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Return the sum over valid targets; fp32, 0-dim. logits [..., V], targets [...].

    With label smoothing e, each target's loss is (1 - e) x its own + e x the mean over all tokens (Szegedy et al. 2016,
    arXiv:1512.00567, section 7).
    """
    if logits.shape[:-1] != targets.shape:
        shapes = f"outputs are {list(logits.shape)} and targets {list(targets.shape)}"
        raise RunFailed(f"{shapes}; give one target for each output")
    if type(logits) is not Tensor and is_sharded(logits):
        return vocab_parallel_cross_entropy_sum(logits, targets, label_smoothing, IGNORED)
    if logits.dim() > 2:
        logits, targets = logits.flatten(0, -2), targets.flatten()
    if logits.dtype is not torch.float32:
        logits = logits.float()
    if targets.dtype is not torch.int64:
        targets = targets.long()
    try:
        return F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED, label_smoothing=label_smoothing)
    except IndexError as error:
        raise out_of_range(targets[targets != IGNORED], logits.shape[-1]) from error


def _metric_sums(logits: Tensor, targets: Tensor, label_smoothing: float) -> dict[str, Tensor]:
    """Return the number of right answers and, with label smoothing, the loss without it, for the perplexity."""
    logits = full_logits(logits)
    sums = {"right": (logits.argmax(-1) == targets).sum()}  # -100 is never the argmax
    if label_smoothing:
        sums["plain_loss"] = cross_entropy_sum(logits, targets)
    return sums


def _without_last_dim(targets: Tensor) -> Tensor:
    return targets.flatten() if targets.dim() == 2 and targets.shape[1] == 1 else targets


def _spans(batch: Batch) -> tuple[Tensor, Tensor]:
    inputs = batch.inputs if isinstance(batch.inputs, Mapping) else {}
    if not {"start_positions", "end_positions"} <= set(inputs):
        keys = ", ".join(inputs) or "none"
        raise RunFailed(f"the inputs of a batch are {keys}; question answering needs start_positions and end_positions")
    return inputs["start_positions"].reshape(-1).clamp(min=0), inputs["end_positions"].reshape(-1).clamp(min=0)


def _mean(total: float, count: float) -> float:
    return total / count if count else math.nan
