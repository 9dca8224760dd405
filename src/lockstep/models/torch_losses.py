"""The losses of torch as objectives: sums over targets, and the counts that torch divides them by.

    CrossEntropyLoss, NLLLoss       valid targets; with class weights, the sum of their weights
    element-wise losses             elements: MSELoss, L1Loss, BCEWithLogitsLoss, KLDivLoss, ...
    losses of several outputs       samples: MultiMarginLoss, MultiLabelMarginLoss, MultiLabelSoftMarginLoss

Reduction "batchmean" divides by samples; "sum" by valid targets, or by samples.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lockstep.core import extensions
from lockstep.core.errors import ConfigError, Problem, RunFailed
from lockstep.core.records import Batch
from lockstep.models.outputs import logits_of

_CLASS_LOSSES = (nn.CrossEntropyLoss, nn.NLLLoss)
_ELEMENT_LOSSES = (
    nn.L1Loss, nn.MSELoss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.SoftMarginLoss,
    nn.PoissonNLLLoss, nn.HingeEmbeddingLoss, nn.KLDivLoss,
)  # fmt: skip
_SAMPLE_LOSSES = (nn.MultiMarginLoss, nn.MultiLabelMarginLoss, nn.MultiLabelSoftMarginLoss)
_PAIRED = (*_ELEMENT_LOSSES, nn.MultiLabelMarginLoss, nn.MultiLabelSoftMarginLoss)  # a target for each output
LOSSES: Mapping[str, type[nn.Module]]
LOSSES = {kind.__name__: kind for kind in (*_CLASS_LOSSES, *_ELEMENT_LOSSES, *_SAMPLE_LOSSES)}
"""The supported losses, by their names in a config."""

_FUNCTIONS: Mapping[object, type[nn.Module]] = dict(
    zip(
        (
            F.cross_entropy, F.nll_loss, F.l1_loss, F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy,
            F.binary_cross_entropy_with_logits, F.soft_margin_loss, F.poisson_nll_loss, F.hinge_embedding_loss,
            F.kl_div, F.multi_margin_loss, F.multilabel_margin_loss, F.multilabel_soft_margin_loss,
        ),
        LOSSES.values(),
        strict=True,
    )
)  # fmt: skip
"""The loss modules of functions, which are in the order of `LOSSES`."""
_TO_CLASSES = "have the dataset return class numbers (int64), such as {'cat': 0, 'dog': 1}[name]"
_TARGET_NAMES = ("target", "targets", "label", "labels", "y", "y_true")
_WRITE_A_CLASS = (
    "write a class with count(batch), the number of targets, and loss_sum(outputs, batch), the sum of their losses"
)


def construct_objective(target: str, arguments: Mapping[str, Any]) -> object:
    """Return the objective that a config names: from a user's file, a package, or a loss of torch by its name.

    Class weights of a loss of torch may be lists of numbers.
    """
    name = f"torch.nn:{target}" if target in LOSSES else target
    kind = extensions.load("objectives", name, builtin=LOSSES)
    if inspect.isclass(kind) and issubclass(kind, nn.modules.loss._Loss):
        weights = {key: arguments[key] for key in ("weight", "pos_weight") if isinstance(arguments.get(key), list)}
        arguments = {**arguments, **{key: torch.tensor(value, dtype=torch.float32) for key, value in weights.items()}}
    return extensions.construct("objectives", name, arguments, builtin=LOSSES)


def loss_module(objective: object) -> nn.modules.loss._Loss | None:
    """Return a loss module of torch, or one for a function of `torch.nn.functional`; None for other objects."""
    if isinstance(objective, nn.modules.loss._Loss):
        return objective
    function, options = objective, {}
    if isinstance(objective, partial) and not objective.args:
        function, options = objective.func, objective.keywords
    if inspect.isfunction(function) and function.__module__ == "torch.nn.functional":
        kind = _FUNCTIONS.get(function)
        if kind is None:
            name = f"torch.nn.functional.{function.__name__}"
            raise ConfigError(f"{name} takes more than outputs and targets; {_WRITE_A_CLASS}")
        try:
            module: Any = kind(**options)
        except TypeError as error:
            raise ConfigError(f"{kind.__name__}, the loss module of {function.__name__}: {error}") from error
        return module  # type: ignore[no-any-return]
    _refuse_function_of_targets(objective)
    return None


def _refuse_function_of_targets(objective: object) -> None:
    called = objective.forward if isinstance(objective, nn.Module) else objective
    if not callable(called) or inspect.isclass(called):
        return
    try:
        names = list(inspect.signature(called).parameters)
    except (TypeError, ValueError):  # some builtins have no signature
        return
    if len(names) > 1 and names[1] in _TARGET_NAMES:
        name = type(objective).__name__ if isinstance(objective, nn.Module) else getattr(called, "__name__", "it")
        raise ConfigError(
            f"{name} takes ({', '.join(names)}), and the count it divides by is unknown; {_WRITE_A_CLASS}, which it "
            "may compute from batch.targets"
        )


class TorchLoss:
    """An objective with the value and the gradient of a loss module of torch, for any split of the samples.

    Raises:
        ConfigError: It takes more than outputs and targets, or the count it divides by is unknown.
    """

    decomposes = True

    def __init__(self, loss: nn.modules.loss._Loss) -> None:
        name = type(loss).__name__
        known = next((kind for kind in LOSSES.values() if isinstance(loss, kind)), None)
        self.is_known = known is not None and type(loss).forward is known.forward
        if not self.is_known and type(loss).__module__.startswith("torch.nn."):
            takes = ", ".join([*inspect.signature(loss.forward).parameters])
            raise ConfigError(f"{name} takes ({takes}), more than outputs and targets; {_WRITE_A_CLASS}")
        if loss.reduction == "none":
            raise ConfigError(f"{name} has reduction='none', a loss for each target; set reduction='mean' or 'sum'")
        if not self.is_known and loss.reduction != "sum":
            raise ConfigError(
                f"{name} has reduction={loss.reduction!r}, and the count its forward divides by is unknown; losses "
                "must be summed and divided once, by the global count, to be the same under any split of the samples: "
                f'use {name}(reduction="sum")'
            )
        self._reduction = loss.reduction
        self._loss = copy.deepcopy(loss)
        self._loss.reduction = "sum"
        self._device = torch.device("cpu")
        self._ignored: int | None = getattr(loss, "ignore_index", None)  # of cross entropy and NLL
        weight = loss.weight if isinstance(loss, _CLASS_LOSSES) and loss.reduction == "mean" else None
        self._class_weights = None if weight is None else weight.detach().cpu()

    def count(self, batch: Batch) -> float:
        """Return the number that torch divides the sum by."""
        targets = tensor_targets(batch)
        if self._ignored is not None:
            return self._count_classes(targets)
        if self._reduction != "mean" or isinstance(self._loss, nn.MultiMarginLoss):
            return batch.samples
        if isinstance(self._loss, _SAMPLE_LOSSES):
            return targets.numel() // max(1, targets.shape[-1])
        return targets.numel()

    def _count_classes(self, targets: Tensor) -> float:
        if targets.is_floating_point():  # probabilities [samples, classes, ...], which torch divides by their number
            if targets.dim() < 2:
                raise RunFailed(f"targets are {targets.dtype} {list(targets.shape)}; {_TO_CLASSES}")
            return targets.numel() // max(1, targets.shape[1])
        valid: Tensor = targets != self._ignored  # type: ignore[assignment]
        if self._class_weights is None:
            return int(valid.sum())
        classes = targets[valid].cpu()
        try:
            return float(self._class_weights[classes].double().sum())
        except IndexError as error:
            highest, number = int(classes.max()), len(self._class_weights)
            raise RunFailed(f"targets go up to {highest}, but the loss has {number} class weights") from error

    def loss_sum(self, outputs: object, batch: Batch) -> Tensor:
        """Return the loss with reduction "sum"."""
        predicted, targets = logits_of(outputs).float(), tensor_targets(batch)
        outs, wanted, remedy = list(predicted.shape), list(targets.shape), None
        if isinstance(self._loss, _CLASS_LOSSES):
            remedy = _class_remedy(outs, wanted, probabilities=targets.is_floating_point())
        elif isinstance(self._loss, _PAIRED) and outs != wanted:
            remedy = f"give targets of {outs}, or return outputs of {wanted}"
        if remedy is not None:
            what = f"{type(self._loss).__name__}: outputs are {outs} and targets {wanted}"
            raise ConfigError(Problem("", "objective", f"{what}; {remedy}"))
        if predicted.device != self._device:  # moves class weights
            self._loss, self._device = self._loss.to(predicted.device), predicted.device
        of_floats = targets.is_floating_point() or isinstance(self._loss, _ELEMENT_LOSSES)
        try:
            summed: Tensor = self._loss(predicted, targets.to(predicted.dtype if of_floats else torch.int64))
        except IndexError as error:
            raise out_of_range(targets[targets != self._ignored], predicted.shape[1]) from error
        return summed

    def metric_sums(self, outputs: object, batch: Batch) -> Mapping[str, Tensor]:
        """Return no sums: the loss is the only metric."""
        return {}

    def metrics(self, loss_sum: float, count: float, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the loss as torch reduces it over the whole dataset."""
        return {"loss": loss_sum / count if count else float("nan")}


def no_targets() -> RunFailed:
    """Return the failure of an objective that needs targets."""
    return RunFailed(
        "a batch has no targets, but this objective needs them: give items the key `labels` (or label, targets, "
        "target); a causal language model's are a copy of input_ids, with -100 for padding"
    )


def tensor_targets(batch: Batch) -> Tensor:
    """Return the targets of a batch. Raises RunFailed if they aren't a tensor."""
    targets = batch.targets
    if targets is None:
        raise no_targets()
    if isinstance(targets, Tensor):
        return targets
    first = targets[0] if isinstance(targets, tuple | list) and targets else targets
    what = f"texts, such as {first!r}" if isinstance(first, str) else f"a {type(targets).__name__}"
    raise RunFailed(f"targets are {what}, not a tensor; {_TO_CLASSES}")


def out_of_range(valid: Tensor, classes: int) -> RunFailed:
    """Return the failure of targets that the model has no output for."""
    outputs = f"{classes} outputs, 0 to {classes - 1}"
    return RunFailed(f"targets are {valid.min()} to {valid.max()}, but the model has {outputs}")


def _class_remedy(outputs: list[int], targets: list[int], *, probabilities: bool) -> str | None:
    """Return the remedy for shapes that torch's losses of classes don't take; None if they take them.

    Classes are always in the second dim: outputs [B, C, N] with targets [B, N] never mean [B, N, C], even if C is N.
    """
    if len(outputs) < 2:
        return f"torch takes classes in the second dim: have the forward return outputs of [{outputs[0]}, classes]"
    expected = outputs if probabilities else [outputs[0], *outputs[2:]]
    if targets == expected:
        return None
    if targets == outputs[:-1]:
        return (
            "torch takes classes in the second dim, but they are in the last. Instead of the loss write "
            "objective: {kind: next-token} in the config, or masked-lm for labels at their own positions; or have the "
            f"forward return outputs.movedim(-1, 1), {[outputs[0], outputs[-1], *outputs[1:-1]]}"
        )
    if probabilities:
        return f"class probabilities have the shape of the outputs: give targets of {expected}"
    return f"torch takes classes in the second dim and one target for each of the others: give targets of {expected}"
