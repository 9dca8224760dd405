"""Forward and backward, micro-batch after micro-batch, in this process.

    for each micro-batch:   key draws -> forward (autocast) -> loss sum (fp32) -> backward, seeded with
                                                                                         loss scale / global count

The gradient of an update is that of (sum of losses / global count of valid targets), however it was split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

import torch

from lockstep.core.errors import ConfigError, Problem
from lockstep.core.out_of_memory import mark
from lockstep.engine.input_names import inputs_misfit
from lockstep.engine.judging import Unheard, add_up, heard_or_not, sums_of_outputs

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.core.out_of_memory import Phase
    from lockstep.core.protocols import EvaluatedObjective, Sharding
    from lockstep.core.records import Batch, GlobalBatch, Inputs

_FORWARD: Phase = "forward"
_BACKWARD: Phase = "backward"

Autocast = Callable[[], AbstractContextManager[object]]


def _as_it_is(batch: Batch) -> Batch:
    return batch


class Eager:
    """The engine of every strategy that leaves the model in one piece.

    Args:
        autocast: makes the context of a forward.
        key_draws: called with (step, micro-batch) before each forward.
        unheard: makes the context in which filler is computed: what user code logs of it is no data.
        prepare: called with each micro-batch before its forward; what it returns is computed.
    """

    def __init__(
        self,
        sharding: Sharding,
        objective: EvaluatedObjective,
        autocast: Autocast,
        key_draws: Callable[[int, int], None],
        unheard: Unheard = nullcontext,
        prepare: Callable[[Batch], Batch] = _as_it_is,
    ) -> None:
        self._prepare = prepare
        self._sharding = sharding
        self._objective = objective
        self._autocast = autocast
        self._key_draws = key_draws
        self._unheard = unheard

    def accumulate(
        self,
        batch: GlobalBatch,
        seed_scale: float | Tensor,
        announce: Callable[[Tensor], None],
    ) -> None:
        micro_batches, step = batch.micro_batches, batch.step
        sharding, objective = self._sharding, self._objective
        module, last = sharding.module, len(micro_batches) - 1
        total: Tensor | None = None
        index, phase = 0, _FORWARD
        try:
            for index, micro_batch in enumerate(micro_batches):
                phase = _FORWARD
                self._key_draws(step, index)
                with sharding.window(index == last), heard_or_not(micro_batch, self._unheard):
                    micro_batch = self._prepare(micro_batch)
                    with self._autocast():
                        outputs = call(module, micro_batch.inputs)
                    loss = objective.loss_sum(outputs, micro_batch)
                    if not isinstance(loss, torch.Tensor):
                        raise _no_loss(loss)
                    counted = loss.detach() if micro_batch.samples else torch.zeros_like(loss)
                    total = counted if total is None else total + counted
                    if index == last:
                        announce(total)
                    weight = 1.0 if micro_batch.samples else 0.0
                    phase = _BACKWARD
                    sharding.backward(loss, _seed(seed_scale * weight, loss))
        except Exception as error:
            if _ONE_VALUE in str(error):
                raise _one_sample(micro_batches[index].samples) from error
            mark(error, phase, f"in the {phase} pass of micro-batch {index + 1} of {last + 1}, update {step + 1}")
            raise

    @torch.no_grad()
    def outputs(self, inputs: Inputs) -> object:
        with self._autocast():
            return call(self._sharding.bare, inputs)

    def evaluate(self, micro_batches: Iterable[Batch]) -> Mapping[str, Tensor]:
        return add_up(self._sharding.bare, micro_batches, self._sums, self._unheard)

    def _sums(self, batch: Batch) -> dict[str, Tensor]:
        batch = self._prepare(batch)
        return sums_of_outputs(self._objective, self.outputs(batch.inputs), batch)


def call(module: nn.Module, inputs: Inputs) -> object:
    """The forward: a mapping's values go in by name, a tuple's by position.

    Raises:
        ConfigError: the forward doesn't take these.
    """
    return _called(module, module, inputs)


def call_without_hooks(module: nn.Module, inputs: Inputs) -> object:
    """The module's forward, without the hooks around it.

    Raises:
        ConfigError: the forward doesn't take these.
    """
    return _called(module.forward, module, inputs)


def _called(forward: Callable[..., object], module: nn.Module, inputs: Inputs) -> object:
    try:
        return forward(*inputs) if isinstance(inputs, tuple) else forward(**inputs)
    except Exception as error:  # a model that swallows other names fails in its own way
        misfit = inputs_misfit(module, inputs)
        if misfit is None:
            raise
        raise misfit from error


def _seed(scale: float | Tensor, loss: Tensor) -> Tensor:
    """The gradient that a backward starts from."""
    if isinstance(scale, torch.Tensor):
        return scale.to(loss)
    return torch.tensor(scale, dtype=loss.dtype, device=loss.device)


_ONE_VALUE = "Expected more than 1 value per channel when training"
"""Of torch's batch norm."""


def _one_sample(samples: int) -> ConfigError:
    message = (
        f"batch norm needs more than one value, and a rank's micro-batch has {samples} sample{'s' * (samples != 1)}; "
        "take a larger batch.global_size or batch.micro_size, so that no rank is left with one, or a norm without a "
        "batch, such as group norm"
    )
    return ConfigError(Problem("", "batch", message))


def _no_loss(found: object) -> ConfigError:
    message = (
        f"loss_sum returned a {type(found).__name__}, and an update has one loss: a tensor with the sum over valid "
        "targets. Losses that train different parts (a GAN's) take a run each; else return their sum"
    )
    return ConfigError(Problem("", "objective", message))
