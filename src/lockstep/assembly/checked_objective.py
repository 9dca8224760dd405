"""A check of a user's objective: its first loss is compared with the losses of the batch's halves.

    loss of a batch = sum of its halves' losses      it is the sum that an update divides by the count of all targets
    between its halves' losses                       it is a mean: refused
    neither                                          samples depend on each other: a warning

It uses the outputs of the step itself, in the first update with a micro-batch of two samples or more. Untrained
parameters, and tensors of the objective that it changes and no checkpoint has, are refused, too.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lockstep.core.errors import ConfigError, Problem
from lockstep.core.formatting import listed
from lockstep.distributed.generators import replayed_draws
from lockstep.engine.dry_run import unchanged
from lockstep.models.building_objectives import FunctionObjective
from lockstep.monitor.metric_log import MetricLog, recording

if TYPE_CHECKING:
    from lockstep.core.protocols import EvaluatedObjective
    from lockstep.core.records import Batch

_LOG = logging.getLogger("lockstep")
_TOLERANCE = 0.02  # of a sum against its halves' sum: losses may have been computed in bf16
_TOO_SMALL = 1e-6  # a loss that can't be compared

LossSum = Callable[[Any, "Batch"], Tensor]


class CheckedObjective:
    """A user's objective that is checked once, in the first update. `key` is its key in the config."""

    def __init__(self, objective: FunctionObjective, model: nn.Module, key: str) -> None:
        self._objective = objective
        self._model = model
        self._key = key
        self._keeps_no_state = False
        self._loss_sum: LossSum = self._checked if objective.decomposes else self._with_parameters_checked
        self.decomposes = objective.decomposes
        self.count = objective.count
        self.metric_sums = objective.metric_sums
        self.metrics = objective.metrics
        self.from_companion = objective.from_companion

    @classmethod
    def of(cls, objective: EvaluatedObjective, model: nn.Module, key: str) -> EvaluatedObjective:
        """Return the objective with checks, if nothing is known of it."""
        return cls(objective, model, key) if isinstance(objective, FunctionObjective) else objective

    def loss_sum(self, outputs: object, batch: Batch) -> Tensor:
        """Return the objective's sum. Raises ConfigError if it is a mean, or has parameters or state of its own."""
        return self._loss_sum(outputs, batch)

    def _checked(self, outputs: object, batch: Batch) -> Tensor:
        loss = self._without_changes(outputs, batch)
        if not torch.is_grad_enabled() or not batch.samples or not _is_number(loss):
            return loss
        halves = _halves(outputs, batch)
        if halves is None:
            return loss
        with ExitStack() as stack:
            has_drawn = stack.enter_context(replayed_draws(loss.device))
            loss_sum = _copied(self._objective.loss_sum, stack)
            half_losses = [loss_sum(*half) for half in halves]
            is_random = has_drawn()
        self._refuse_parameters(half_losses[0])
        if is_random:  # another draw is another loss: nothing can be compared
            self._loss_sum = self._objective.loss_sum
        elif all(map(_is_number, half_losses)):
            terms = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
            of_samples = all(leaf.dim() for leaf in terms)  # else each half has a term of the whole batch
            self._compare(loss.item(), [half.item() for half in half_losses], batch.samples, of_samples)
        return loss

    def _with_parameters_checked(self, outputs: object, batch: Batch) -> Tensor:
        loss = self._without_changes(outputs, batch)
        if torch.is_grad_enabled():
            self._refuse_parameters(loss, outputs)
            self._loss_sum = self._objective.loss_sum
        return loss

    def _without_changes(self, outputs: object, batch: Batch) -> Tensor:
        """Return the sum. Raises ConfigError if the first one of training changes the objective's own tensors."""
        if self._keeps_no_state or not torch.is_grad_enabled():
            return self._objective.loss_sum(outputs, batch)
        before = {name: (tensor, _value(tensor)) for name, tensor in self._own_tensors()}
        loss = self._objective.loss_sum(outputs, batch)
        changed = [name for name, now in self._own_tensors() if name in before and _is_changed(*before[name], now)]
        if changed:
            why = (
                f"loss_sum changes {listed(changed, 3)}, and a checkpoint has only the model's tensors. Put a fixed "
                "model, such as a teacher, into evaluation mode (.eval()); make a state that the loss needs buffers of "
                "the model: its forward changes them and returns them with its outputs"
            )
            raise ConfigError(Problem("", self._key, why))
        self._keeps_no_state = True
        return loss

    def _own_tensors(self) -> Iterator[tuple[str, Tensor]]:
        modules = {name: value for name, value in _held(self._objective.loss_sum) if isinstance(value, nn.Module)}
        of_model = set(self._model.modules()) if modules else set()
        for name, module in modules.items():
            for inner, part in () if module in of_model else module.named_modules(prefix=name):
                if part not in of_model:
                    for key, tensor in {**part._parameters, **part._buffers}.items():
                        if tensor is not None and key not in part._non_persistent_buffers_set:
                            yield f"{inner}.{key}".lstrip("."), tensor

    def _compare(self, whole: float, halves: list[float], samples: int, of_samples: bool) -> None:
        total, size = sum(halves), sum(map(abs, halves))
        if not math.isfinite(whole + size) or min(map(abs, halves)) <= _TOO_SMALL:
            return
        self._loss_sum = self._objective.loss_sum
        if abs(whole - total) <= _TOLERANCE * size:
            return
        slack = _TOLERANCE * size / 2
        first, second = sorted(halves)
        values = f"on {samples} samples it is {whole:.6g}, and on the halves {halves[0]:.6g} and {halves[1]:.6g}"
        if first - slack <= whole <= second + slack:
            why = (
                f"the loss isn't a sum over the samples, perhaps a mean: {values}. Return the sum over valid targets "
                '(such as reduction="sum"): it is divided once, by the count of the whole update'
            )
            raise ConfigError(Problem("", self._key, why))
        if not of_samples:
            return
        self.decomposes = False
        why = "the run depends on batch.micro_size and the number of ranks; if that is meant, set decomposes = False"
        _LOG.warning("%s: the loss of a batch isn't the sum of its samples': %s; %s", self._key, values, why)

    def _refuse_parameters(self, loss: Tensor, outputs: object = None) -> None:
        """Raise ConfigError if the loss depends on untrained parameters, otherwise than by the outputs."""
        trained = set(map(id, self._model.parameters()))  # not what FSDP gathers to compute the outputs
        others = [leaf for leaf in _leaves(loss, outputs) if id(leaf) not in trained and leaf.requires_grad]
        if not others:
            return
        names = {id(tensor): name for name, tensor in _parameters(self._objective.loss_sum)}
        shown = listed([f"{names.get(id(leaf), 'a tensor')} {list(leaf.shape)}" for leaf in others], 3)
        why = (
            f"the loss depends on {shown}, which no optimizer updates. Make them part of the model and return "
            "them with its outputs, or freeze them with requires_grad_(False)"
        )
        raise ConfigError(Problem("", self._key, why))


def _halves(outputs: object, batch: Batch) -> list[tuple[Any, Batch]] | None:
    """Return the halves of the detached outputs and of the batch; None if tensors can't be split by samples."""
    samples = batch.samples
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor)]
    if samples < 2 or not tensors or any(tensor.dim() and tensor.shape[0] != samples for tensor in tensors):
        return None
    middle = samples // 2

    def half(places: slice) -> tuple[Any, Batch]:
        def split(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            value = value.detach()
            return value[places] if value.dim() and value.shape[0] == samples else value

        parts = {name: tree_map(split, getattr(batch, name)) for name in ("inputs", "targets", "companion")}
        return tree_map(split, outputs), replace(batch, **parts, samples=len(range(samples)[places]))

    return [half(slice(0, middle)), half(slice(middle, samples))]


def _copied(loss_sum: LossSum, stack: ExitStack) -> LossSum:
    """Return the method of a copy: the comparison must change no state of the objective."""
    stack.enter_context(recording(MetricLog()))
    if isinstance(loss_sum, nn.Module):
        stack.enter_context(unchanged(loss_sum))
        return loss_sum
    if not inspect.ismethod(loss_sum):
        return loss_sum
    if isinstance(loss_sum.__self__, nn.Module):
        stack.enter_context(unchanged(loss_sum.__self__))
        return loss_sum
    function: Any = loss_sum.__func__
    copied = copy.copy(loss_sum.__self__)
    return lambda outputs, batch: function(copied, outputs, batch)


def _is_number(loss: object) -> bool:
    return isinstance(loss, Tensor) and not loss.dim() and not loss.is_complex()


def _leaves(loss: object, outputs: object) -> Iterator[Tensor]:
    """Yield the tensors that would accumulate a gradient of the loss, without the ones behind the outputs."""
    seen: set[Any] = {None, *(getattr(leaf, "grad_fn", None) for leaf in tree_leaves(outputs))}
    pending = [node for node in [getattr(loss, "grad_fn", None)] if node not in seen]
    while pending:
        node: Any = pending.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor) and leaf.is_leaf:
            yield leaf
        following = {function for function, _ in node.next_functions} - seen
        seen |= following
        pending += following


def _held(loss_sum: Any) -> Iterator[tuple[str, Any]]:
    """Yield an objective and its contents: attributes, closure variables, and partial arguments."""
    holder = loss_sum.__self__ if inspect.ismethod(loss_sum) else loss_sum
    if isinstance(holder, nn.Module):
        yield "", holder
        return
    if isinstance(holder, partial):
        yield from _held(holder.func)
        yield from ((f"argument {number}", value) for number, value in enumerate(holder.args, 1))
        yield from holder.keywords.items()
    yield from getattr(holder, "__dict__", {}).items()
    if inspect.isfunction(holder):
        yield from inspect.getclosurevars(holder).nonlocals.items()


def _parameters(loss_sum: Any) -> Iterable[tuple[str, Tensor]]:
    for name, value in _held(loss_sum):
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, nn.Module):
            yield from ((f"{name}.{inner}".lstrip("."), tensor) for inner, tensor in value.named_parameters())


def _value(tensor: Tensor) -> Tensor | int | None:
    """Return what shows whether a tensor changes: a copy of a buffer, the version of a parameter."""
    if not isinstance(tensor, nn.Parameter):
        return tensor.detach().clone()
    return None if tensor.is_inference() else tensor._version


def _is_changed(before: Tensor, value: Tensor | int | None, now: Tensor) -> bool:
    if not isinstance(value, Tensor):
        return now is before and value is not None and now._version != value
    if now.shape != value.shape:
        return True
    value = value.to(now)
    return not bool(((now == value) | (now != now) & (value != value)).all())
