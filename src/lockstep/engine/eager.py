"""Forward and backward, micro-batch after micro-batch, in this process.

    for each micro-batch:   key draws -> forward (autocast) -> loss sum (fp32) -> backward, seeded with
                                                                                         loss scale / global count

Evaluation adds losses, counts and metrics in fp64. Padding samples, which give all ranks the same number of batches,
add zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING

import torch

from lockstep.core.errors import ConfigError, Problem
from lockstep.core.modes import evaluation_mode
from lockstep.core.out_of_memory import note_location
from lockstep.core.phase_clock import Phase as ClockPhase
from lockstep.core.phase_clock import PhaseClock
from lockstep.core.protocols import NO_CONTEXT, Observe, unobserved
from lockstep.engine.input_names import dtypes_misfit, inputs_misfit
from lockstep.engine.module_calls import not_gathered

if TYPE_CHECKING:
    from torch import Tensor, nn

    from lockstep.core.out_of_memory import Phase
    from lockstep.core.protocols import EvaluatedObjective, GradientStep
    from lockstep.core.records import Batch, GlobalBatch, Inputs

Context = Callable[[], AbstractContextManager[object]]
"""Makes a new context at each call."""
KeyDraws = Callable[["GlobalBatch", int, int], None]
"""Keys the draws of a micro-batch's forward: (update, micro-batch, stage)."""
_FORWARD: Phase = "forward"
_BACKWARD: Phase = "backward"
_OWN_SUMS = ("loss_sum", "count")
_ONE_VALUE = "Expected more than 1 value per channel when training"
"""The message of torch's batch norm."""


class EagerEngine:
    """The engine of a model with its forward in one process.

    Args:
        model: The module without wrappers, which an evaluation's forward calls.
        key_draws: Called before each forward.
        muted: Makes a context that drops what user code logs, such as for padding samples.
        prepare: Returns the micro-batch to compute, of a micro-batch; None: the same.
        ahead: Returns the micro-batches to compute, of all of an update or an evaluation; None: the same.
    """

    def __init__(
        self,
        step: GradientStep,
        model: nn.Module,
        objective: EvaluatedObjective,
        autocast: Context,
        key_draws: KeyDraws,
        muted: Context = nullcontext,
        prepare: Callable[[Batch], Batch] | None = None,
        clock: PhaseClock | None = None,
        ahead: Callable[[Iterable[Batch]], Sequence[Batch]] | None = None,
    ) -> None:
        self._step = step
        self._model = model
        self._objective = objective
        self._autocast = autocast
        self._key_draws = key_draws
        self._muted = muted
        self._prepare = prepare
        self._ahead = ahead
        self._clock = clock or PhaseClock()
        self._phase = _FORWARD  # or the backward of the current micro-batch
        self.losses: list[Tensor] = []
        self._seed: Tensor | None = None  # of the pass before, mostly the same
        self._seed_scale = 0.0

    def accumulate(self, batch: GlobalBatch, seed_scale: float | Tensor, announce: Callable[[Tensor], None]) -> None:
        step = self._step
        micro_batches: Sequence[Batch] = batch.micro_batches
        last = len(micro_batches) - 1
        self.losses = []
        index = 0
        try:
            if self._ahead is not None:
                self._phase = _FORWARD
                self._clock.enter(ClockPhase.FORWARD)
                micro_batches = self._ahead(micro_batches)
            for index, micro_batch in enumerate(micro_batches):
                self._phase = _FORWARD
                self._clock.enter(ClockPhase.FORWARD)
                self._key_draws(batch, index, 0)
                announced = announce if index == last else None
                sync = step.sync_context(index == last)
                if sync is NO_CONTEXT and micro_batch.samples:
                    self._pass(micro_batch, seed_scale, announced, first=not batch.step)
                else:
                    with sync, muted_padding(micro_batch, self._muted):
                        scale = seed_scale if micro_batch.samples else seed_scale * 0.0
                        self._pass(micro_batch, scale, announced, first=not batch.step)
        except Exception as error:
            if _ONE_VALUE in str(error):
                raise _one_sample(micro_batches[index].samples) from error
            if (misfit := not_gathered(step.module, error)) is not None:  # of the objective, or the backward
                raise misfit from error
            where = f"micro-batch {index + 1} of {last + 1}, update {batch.step + 1}"
            note_location(error, self._phase, f"in the {self._phase} pass of {where}")
            raise
        finally:
            self._clock.enter(ClockPhase.HOST)

    def _pass(
        self, batch: Batch, seed_scale: float | Tensor, announce: Callable[[Tensor], None] | None, *, first: bool
    ) -> None:
        """Run forward and backward of a micro-batch; `announce` gets the sum of the update's losses in between."""
        padding = not batch.samples
        if self._prepare is not None:
            batch = self._prepare(batch)
        autocast = self._autocast()
        if autocast is NO_CONTEXT:
            outputs = call(self._step.module, batch.inputs)
        else:
            with autocast:
                outputs = call(self._step.module, batch.inputs)
        loss = self._objective.loss_sum(outputs, batch)
        del outputs  # of a vocabulary, they are the largest tensor, and the backward may not need it
        if first or not isinstance(loss, torch.Tensor):
            refuse_loss(loss)
        self.losses.append(torch.zeros_like(loss) if padding else loss.detach())
        if announce is not None:
            announce(sum(self.losses[1:], self.losses[0]))
        self._phase = _BACKWARD
        self._clock.enter(ClockPhase.BACKWARD)
        seed = self._seed
        if isinstance(seed_scale, torch.Tensor):
            seed = seed_scale.to(loss)
        elif seed is None or seed_scale != self._seed_scale or seed.dtype is not loss.dtype:
            seed = self._seed = torch.tensor(seed_scale, dtype=loss.dtype, device=loss.device)
            self._seed_scale = seed_scale
        self._step.backward(loss, seed)

    @torch.no_grad()
    def outputs(self, inputs: Inputs) -> object:
        with self._autocast():
            return call(self._model, inputs)

    def evaluate(self, micro_batches: Iterable[Batch], observe: Observe = unobserved) -> Mapping[str, Tensor]:
        if self._ahead is not None:
            micro_batches = self._ahead(micro_batches)
        return sum_over(self._model, micro_batches, partial(self._sums, observe), self._muted)

    def _sums(self, observe: Observe, batch: Batch) -> dict[str, Tensor]:
        if self._prepare is not None:
            batch = self._prepare(batch)
        outputs = self.outputs(batch.inputs)
        observe(self._objective, outputs, batch)
        return sums_of_outputs(self._objective, outputs, batch)


def call(module: nn.Module, inputs: Inputs, *, hooks: bool = True) -> object:
    """Return the module's output for inputs by name or position; `hooks`: run the module's hooks."""
    forward = module if hooks else module.forward
    try:
        return forward(*inputs) if isinstance(inputs, tuple) else forward(**inputs)
    except Exception as error:  # a model with **kwargs fails in its own way
        misfit = inputs_misfit(module, inputs) or dtypes_misfit(module, inputs, error) or not_gathered(module, error)
        if misfit is None:
            raise
        raise misfit from error


def muted_padding(batch: Batch, muted: Context) -> AbstractContextManager[object]:
    """Return the context of a batch's forward: what user code logs of padding samples is dropped."""
    return NO_CONTEXT if batch.samples else muted()


@torch.no_grad()
def sum_over(
    model: nn.Module, batches: Iterable[Batch], sums_of: Callable[[Batch], Mapping[str, Tensor]], muted: Context
) -> dict[str, Tensor]:
    """Return the sums of `sums_of` over batches, computed with the model in evaluation mode."""
    totals: dict[str, Tensor] = {}
    with evaluation_mode(model):
        for batch in batches:
            with muted_padding(batch, muted):
                sums = sums_of(batch)
            for name, value in sums.items():
                value = value.double() if batch.samples else torch.zeros_like(value, dtype=torch.float64)
                totals[name] = totals[name] + value if name in totals else value
    return totals


def sums_of_outputs(objective: EvaluatedObjective, outputs: object, batch: Batch) -> dict[str, Tensor]:
    """Return the numbers of one batch that an evaluation sums."""
    count = torch.tensor(float(objective.count(batch)))
    loss_sum = objective.loss_sum(outputs, batch)
    return {"loss_sum": loss_sum, "count": count} | dict(_numbers(objective.metric_sums(outputs, batch)))


def _numbers(sums: object) -> Iterator[tuple[str, Tensor]]:
    if not isinstance(sums, Mapping):
        why = f"metric_sums returned a {type(sums).__name__}; return a mapping of names to sums"
        raise ConfigError(Problem("", "objective", why))
    for name, value in sums.items():
        try:
            number = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError):
            number = None
        is_sum = number is not None and number.numel() == 1 and not number.is_complex()
        if number is None or not is_sum or not isinstance(name, str) or name in _OWN_SUMS:
            what = type(value).__name__ if number is None else f"{number.dtype!s} {list(number.shape)}"
            why = (
                f"metric_sums returned {name!r}: {what}; return sums over the batch, such as value.sum(), by names "
                f"other than {' and '.join(_OWN_SUMS)}"
            )
            raise ConfigError(Problem("", "objective", why))
        yield name, number.reshape(())


def _one_sample(samples: int) -> ConfigError:
    why = (
        f"batch norm needs more than one value, and a rank's micro-batch has {samples} sample{'s' * (samples != 1)}; "
        "if it is of the last, smaller update of an epoch, set data.drop_last: true; else set a larger "
        "batch.global_size or batch.micro_size, so that no rank has a single sample, or use a norm without a batch, "
        "such as group norm"
    )
    return ConfigError(Problem("", "batch", why))


def refuse_loss(loss: object) -> None:
    """Raise ConfigError if no backward can start from what an objective has returned."""
    if not isinstance(loss, torch.Tensor):
        why = (
            f"loss_sum returned a {type(loss).__name__}, and an update has one loss: a tensor with the sum over valid "
            "targets. Return the sum of the losses, and log other values by lockstep.log.mean; train parts with losses "
            "of their own (a GAN's) in a run each"
        )
    elif loss.dim() or loss.is_complex():
        kind = f"a {'complex ' * loss.is_complex()}tensor of shape {list(loss.shape)}"
        why = f"loss_sum returned {kind}; return its sum over valid targets, a real number, 0-dim"
    elif not loss.requires_grad:
        why = (
            "the loss doesn't depend on the model's parameters, so there is no gradient: it is a constant, or was cut "
            "off by detach(), item(), torch.no_grad(), NumPy, or a step such as argmax, in the forward or in loss_sum"
        )
    else:
        return
    raise ConfigError(Problem("", "objective", why))
