"""An objective of the user's own, of which a first loss is compared with those of the batch's halves.

    loss of a batch = sum of its halves' losses      it is the sum that an update divides by the count of all targets
    between its halves' losses                       it is a mean: refused
    neither                                          samples look at each other: a warning

The comparison also shows whether the loss depends on parameters that no optimizer knows of. It is made on outputs that
are there anyway, in the first update in which a micro-batch has two samples or more.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from lockstep.core.errors import ConfigError, Problem
from lockstep.distributed.generators import replayed_draws
from lockstep.engine.dry_run import unchanged
from lockstep.models.building_objectives import FunctionObjective
from lockstep.monitor.metric_log import MetricLog, recording

if TYPE_CHECKING:
    from lockstep.core.protocols import EvaluatedObjective
    from lockstep.core.records import Batch

_LOG = logging.getLogger("lockstep")
_SUM = 0.02  # a sum may be this far from that of its halves: losses may have been computed in bf16
_TOO_SMALL = 1e-6  # a loss that says nothing

LossSum = Callable[[Any, "Batch"], Tensor]


class CheckedObjective:
    """Acts as the objective that it stands for.

    Args:
        model: whose parameters are trained.
        key: of the config, that names the objective.
    """

    def __init__(self, objective: FunctionObjective, model: nn.Module, key: str) -> None:
        self._objective = objective
        self._model = model
        self._key = key
        self._loss_sum: LossSum = self._checked if objective.decomposes else self._with_parameters_checked
        self.decomposes = objective.decomposes
        self.count = objective.count
        self.metric_sums = objective.metric_sums
        self.metrics = objective.metrics

    @classmethod
    def of(cls, objective: EvaluatedObjective, model: nn.Module, key: str) -> EvaluatedObjective:
        """Of an objective that nothing is known of; ours are what they are."""
        return cls(objective, model, key) if isinstance(objective, FunctionObjective) else objective

    def loss_sum(self, outputs: object, batch: Batch) -> Tensor:
        """Raises ConfigError: it is a mean, or it depends on parameters of its own."""
        return self._loss_sum(outputs, batch)

    def _checked(self, outputs: object, batch: Batch) -> Tensor:
        loss = self._objective.loss_sum(outputs, batch)
        if not torch.is_grad_enabled() or not batch.samples or not _is_number(loss):
            return loss
        halves = _halves(outputs, batch)
        if halves is None:
            return loss
        with ExitStack() as stack:
            has_drawn = stack.enter_context(replayed_draws(loss.device))
            loss_sum = _twin(self._objective.loss_sum, stack)
            found = [loss_sum(*half) for half in halves]
            is_random = has_drawn()
        self._refuse_parameters(found[0])
        if is_random:  # another draw is another loss: nothing can be compared
            self._loss_sum = self._objective.loss_sum
        elif all(_is_number(one) for one in found):
            self._judge(loss.item(), [one.item() for one in found], batch.samples)
        return loss

    def _with_parameters_checked(self, outputs: object, batch: Batch) -> Tensor:
        loss = self._objective.loss_sum(outputs, batch)
        if torch.is_grad_enabled():
            self._refuse_parameters(loss)
            self._loss_sum = self._objective.loss_sum
        return loss

    def _judge(self, whole: float, halves: list[float], samples: int) -> None:
        total, size = sum(halves), sum(abs(one) for one in halves)
        if not math.isfinite(whole + size) or min(abs(one) for one in halves) <= _TOO_SMALL:
            return
        self._loss_sum = self._objective.loss_sum
        if abs(whole - total) <= _SUM * size:
            return
        slack = _SUM * size / 2
        first, second = sorted(halves)
        told = f"on {samples} samples it is {whole:.6g}, and on the halves {halves[0]:.6g} and {halves[1]:.6g}"
        if first - slack <= whole <= second + slack:
            why = (
                f"the loss is a mean, not a sum: {told}, which should add up to it. Return the sum over valid targets "
                '(such as reduction="sum"): it is divided once, by the count of the whole update'
            )
            raise ConfigError(Problem("", self._key, why))
        self.decomposes = False
        _LOG.warning(
            "%s: the loss of a batch is not the sum of its samples' losses: %s. The run depends on batch.micro_size "
            "and the number of ranks; set decomposes = False on the objective if that is meant",
            self._key,
            told,
        )

    def _refuse_parameters(self, loss: Tensor) -> None:
        """Raises ConfigError: the loss depends on parameters that aren't the model's."""
        trained = {id(one) for one in self._model.parameters()}
        own = [one for one in _leaves(loss) if id(one) not in trained and one.requires_grad]
        own = [one for one in own if isinstance(one, nn.Parameter) or one.is_leaf]
        if not own:
            return
        names = {id(one): name for name, one in _parameters(self._objective.loss_sum)}
        listed = ", ".join(f"{names.get(id(one), 'a tensor')} {list(one.shape)}" for one in own[:3])
        more = f" and {len(own) - 3} more" if len(own) > 3 else ""
        why = (
            f"the loss depends on {listed}{more}, which no optimizer updates: the parameters of the model alone are "
            "trained. Make them part of the model, whose forward returns them with its outputs, or freeze them with "
            "requires_grad_(False)"
        )
        raise ConfigError(Problem("", self._key, why))


def _halves(outputs: object, batch: Batch) -> list[tuple[Any, Batch]] | None:
    """Outputs, without what they were computed from, and batch; None: it can't be said what belongs to which sample."""
    samples = batch.samples
    tensors = [one for one in tree_leaves(outputs) if isinstance(one, Tensor)]
    if samples < 2 or not tensors or any(one.dim() and one.shape[0] != samples for one in tensors):
        return None
    middle = samples // 2

    def part(places: slice) -> tuple[Any, Batch]:
        def cut(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            value = value.detach()
            return value[places] if value.dim() and value.shape[0] == samples else value

        inputs, targets = tree_map(cut, batch.inputs), tree_map(cut, batch.targets)
        number = len(range(samples)[places])
        return tree_map(cut, outputs), replace(batch, inputs=inputs, targets=targets, samples=number)

    return [part(slice(0, middle)), part(slice(middle, samples))]


def _twin(loss_sum: LossSum, stack: ExitStack) -> LossSum:
    """The same, of a copy: what an objective counts or draws as it goes, it does for the run alone."""
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
    twin = copy.copy(loss_sum.__self__)
    return lambda outputs, batch: function(twin, outputs, batch)


def _is_number(loss: object) -> bool:
    return isinstance(loss, Tensor) and loss.numel() == 1 and not loss.is_complex()


def _leaves(loss: object) -> Iterator[Tensor]:
    """Tensors that a gradient of the loss would be accumulated in."""
    waiting = [loss.grad_fn] if isinstance(loss, Tensor) and loss.grad_fn is not None else []
    seen: set[Any] = set(waiting)
    while waiting:
        node: Any = waiting.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, Tensor):
            yield leaf
        following = {one for one, _ in node.next_functions if one is not None} - seen
        seen |= following
        waiting += following


def _parameters(loss_sum: Any) -> Iterable[tuple[str, Tensor]]:
    """By name, those that an objective holds."""
    holder = loss_sum.__self__ if inspect.ismethod(loss_sum) else loss_sum
    if isinstance(holder, nn.Module):
        yield from holder.named_parameters()
        return
    closed = inspect.getclosurevars(holder).nonlocals if inspect.isfunction(holder) else {}
    held: Mapping[str, Any] = {**getattr(holder, "__dict__", {}), **closed}
    for name, value in held.items():
        if isinstance(value, Tensor):
            yield name, value
        elif isinstance(value, nn.Module):
            yield from ((f"{name}.{inner}", one) for inner, one in value.named_parameters())
