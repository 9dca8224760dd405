"""The losses of torch as objectives: sums over targets, and the numbers that torch divides them by.

    loss(outputs, targets), reduction "mean"   =   sum over the update / count over the update, for any split of it

    CrossEntropyLoss, NLLLoss       targets that aren't ignored; with class weights the sum of their weights
    element-wise losses             elements: MSELoss, L1Loss, BCEWithLogitsLoss, KLDivLoss, ...
    losses of several outputs       samples: MultiMarginLoss, MultiLabelMarginLoss, MultiLabelSoftMarginLoss

Reduction "batchmean" divides by samples; "sum" by the targets that aren't ignored, or by samples.
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
LOSSES: Mapping[str, type[nn.Module]] = {
    kind.__name__: kind for kind in (*_CLASS_LOSSES, *_ELEMENT_LOSSES, *_SAMPLE_LOSSES)
}
"""The losses that are known, by the names that a config may give them."""

_FUNCTIONS: Mapping[object, type[nn.Module]] = {
    F.cross_entropy: nn.CrossEntropyLoss,
    F.nll_loss: nn.NLLLoss,
    F.l1_loss: nn.L1Loss,
    F.mse_loss: nn.MSELoss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.huber_loss: nn.HuberLoss,
    F.binary_cross_entropy: nn.BCELoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.soft_margin_loss: nn.SoftMarginLoss,
    F.poisson_nll_loss: nn.PoissonNLLLoss,
    F.hinge_embedding_loss: nn.HingeEmbeddingLoss,
    F.kl_div: nn.KLDivLoss,
    F.multi_margin_loss: nn.MultiMarginLoss,
    F.multilabel_margin_loss: nn.MultiLabelMarginLoss,
    F.multilabel_soft_margin_loss: nn.MultiLabelSoftMarginLoss,
}
_TARGET_NAMES = ("target", "targets", "label", "labels", "y", "y_true")
_WRITE_A_CLASS = (
    "write a class with count(batch), the number of targets, and loss_sum(outputs, batch), the sum of their losses"
)


def construct_objective(target: str, arguments: Mapping[str, Any]) -> object:
    """Return what a config names: a class or function of the user or of a package, or a loss of torch by its name.

    Class weights of a loss of torch may be lists of numbers.

    Raises:
        ConfigError: as `extensions.construct`.
    """
    name = f"torch.nn:{target}" if target in LOSSES else target
    kind = extensions.load("objectives", name, builtin=LOSSES)
    if inspect.isclass(kind) and issubclass(kind, nn.modules.loss._Loss):
        weights = {key: arguments[key] for key in ("weight", "pos_weight") if isinstance(arguments.get(key), list)}
        arguments = {**arguments, **{key: torch.tensor(value, dtype=torch.float32) for key, value in weights.items()}}
    return extensions.construct("objectives", name, arguments, builtin=LOSSES)


def loss_module(objective: object) -> nn.modules.loss._Loss | None:
    """Return the loss module that the object is or, for a function of `torch.nn.functional`, stands for; else None.

    Raises:
        ConfigError: it is a function of torch that is not known, or a function of (outputs, targets).
    """
    if isinstance(objective, nn.modules.loss._Loss):
        return objective
    function, options = objective, {}
    if isinstance(objective, partial) and not objective.args:
        function, options = objective.func, objective.keywords
    if inspect.isfunction(function) and function.__module__ == "torch.nn.functional":
        kind = _FUNCTIONS.get(function)
        if kind is None:
            raise ConfigError(
                f"torch.nn.functional.{function.__name__} takes more than outputs and targets; {_WRITE_A_CLASS}"
            )
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
            f"{name} takes ({', '.join(names)}), and what it divides by is not known; {_WRITE_A_CLASS}, which it may "
            "compute from batch.targets"
        )


class TorchLoss:
    """The objective that gives the value and the gradient of a loss module of torch, however the samples are split.

    Args:
        loss: copied; outputs that are a mapping have the key `logits`.

    Raises:
        ConfigError: it takes more than outputs and targets, or its reduction doesn't say what to divide by.
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
            raise ConfigError(f"{name} has reduction='none', a loss for each target; give reduction='mean' or 'sum'")
        if not self.is_known and loss.reduction != "sum":
            raise ConfigError(
                f"{name} has reduction={loss.reduction!r}, and what its forward divides by is not known; a run is the "
                "same under any split of its samples only if losses are summed and divided once, by the global count: "
                f'give {name}(reduction="sum")'
            )
        self._reduction = loss.reduction
        self._loss = copy.deepcopy(loss)
        self._loss.reduction = "sum"
        self._device = torch.device("cpu")
        self._ignored: int | None = getattr(loss, "ignore_index", None)  # of cross entropy and NLL alone
        weight = loss.weight if isinstance(loss, _CLASS_LOSSES) and loss.reduction == "mean" else None
        self._class_weights = None if weight is None else weight.detach().cpu()

    def count(self, batch: Batch) -> float:
        """Return what torch divides the sum by."""
        targets = _targets_of(batch)
        if self._ignored is not None:
            return self._count_classes(targets)
        if self._reduction != "mean" or isinstance(self._loss, nn.MultiMarginLoss):
            return batch.samples
        if isinstance(self._loss, _SAMPLE_LOSSES):
            return targets.numel() // max(1, targets.shape[-1])
        return targets.numel()

    def _count_classes(self, targets: Tensor) -> float:
        if targets.is_floating_point():  # probabilities [samples, classes, ...], which torch divides by their number
            return targets.numel() // max(1, targets.shape[1])
        valid: Tensor = targets != self._ignored  # type: ignore[assignment]
        if self._class_weights is None:
            return int(valid.sum())
        classes = targets[valid].cpu()
        try:
            return float(self._class_weights[classes].double().sum())
        except IndexError as error:
            highest, number = int(classes.max()), len(self._class_weights)
            raise RunFailed(f"targets go up to {highest}, and the loss has {number} class weights") from error

    def loss_sum(self, outputs: object, batch: Batch) -> Tensor:
        """Return the sum that torch's reduction "sum" gives.

        Raises:
            ConfigError: torch would fail, or silently repeat outputs or targets until they fit each other.
        """
        made, targets = logits_of(outputs).float(), _targets_of(batch)
        remedy = None
        if isinstance(self._loss, _CLASS_LOSSES):
            remedy = _class_remedy(list(made.shape), list(targets.shape), probabilities=targets.is_floating_point())
        elif isinstance(self._loss, _PAIRED) and made.shape != targets.shape:
            remedy = f"give targets of {list(made.shape)}, or have the forward return outputs of {list(targets.shape)}"
        if remedy is not None:
            shapes = f"outputs are {list(made.shape)} and targets {list(targets.shape)}"
            raise ConfigError(Problem("", "objective", f"{type(self._loss).__name__}: {shapes}; {remedy}"))
        if made.device != self._device:  # class weights follow the outputs
            self._loss, self._device = self._loss.to(made.device), made.device
        summed: Tensor = self._loss(made, targets.to(made.dtype) if targets.is_floating_point() else targets)
        return summed

    def metric_sums(self, outputs: object, batch: Batch) -> Mapping[str, Tensor]:
        """Return nothing: only the loss is measured."""
        return {}

    def metrics(self, loss_sum: float, count: float, sums: Mapping[str, float]) -> dict[str, float]:
        """Return the loss as torch reduces it over the whole set."""
        return {"loss": loss_sum / count if count else float("nan")}


def no_targets() -> RunFailed:
    """Return the failure of an objective that needs targets."""
    return RunFailed(
        "a batch has no targets, and this objective needs them: give items the key `labels` (or label, targets, "
        "target); those of a causal language model are a copy of input_ids, -100 where there is padding"
    )


def _targets_of(batch: Batch) -> Tensor:
    if batch.targets is None:
        raise no_targets()
    targets: Tensor = batch.targets
    return targets


def _class_remedy(made: list[int], targets: list[int], *, probabilities: bool) -> str | None:
    """Return what to do about shapes that torch's losses of classes don't take; None if it takes them.

    Classes are in the second dim, always: [B, C, N] and [B, N] are never taken for [B, N, C], also where C is N.
    """
    if len(made) < 2:
        return f"torch takes classes in the second dim: have the forward return outputs of [{made[0]}, classes]"
    wanted = made if probabilities else [made[0], *made[2:]]
    if targets == wanted:
        return None
    if targets == made[:-1]:
        return (
            "torch takes classes in the second dim, and here they are in the last. In place of the loss write "
            "objective: {kind: next-token} in the config, or masked-lm for labels at their own positions; or have the "
            f"forward return outputs.movedim(-1, 1), {[made[0], made[-1], *made[1:-1]]}"
        )
    if probabilities:
        return f"class probabilities have the shape of the outputs: give targets of {wanted}"
    return f"torch takes classes in the second dim and one target for each of the others: give targets of {wanted}"
