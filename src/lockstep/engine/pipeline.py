"""Forward and backward through the stages of a pipeline: the micro-batches are the accumulation.

rank 0   F0 F1 F2    B0 F3 B1    B2    B3        1f1b, two stages
rank 1      F0 B0 F1 B1    F2 B2 F3 B3
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch

from lockstep.core.errors import Failure
from lockstep.core.out_of_memory import note_location
from lockstep.core.phase_clock import Phase, PhaseClock
from lockstep.core.protocols import Observe, unobserved
from lockstep.distributed.collectives import receive, send
from lockstep.engine.dry_run import first_line
from lockstep.engine.eager import muted_padding, refuse_loss, sum_over, sums_of_outputs
from lockstep.engine.placeholders import no_chain
from lockstep.engine.schedule_runner import ScheduleRunner, StageOfSchedule

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import Tensor, nn

    from lockstep.core.protocols import Axis, EvaluatedObjective, GradientStep
    from lockstep.core.records import Batch, GlobalBatch, Inputs
    from lockstep.engine.eager import Context, KeyDraws
    from lockstep.engine.stages import ActivationSpec, PartitionedModel
    from lockstep.plan.stages import Schedule


class PipelineEngine:
    """The engine of a model that is partitioned into stages, for the ranks of one pipeline (`axis`, `group`)."""

    def __init__(
        self,
        step: GradientStep,
        objective: EvaluatedObjective,
        autocast: Context,
        key_draws: KeyDraws,
        muted: Context,
        *,
        stages: PartitionedModel,
        schedule: Schedule,
        axis: Axis,
        group: dist.ProcessGroup,
        device: torch.device,
        clock: PhaseClock | None = None,
    ) -> None:
        self._step = step
        self._objective = objective
        self._autocast = autocast
        self._key_draws = key_draws
        self._muted = muted
        self._clock = clock or PhaseClock()
        self._stages = stages
        self._schedule = schedule
        self._axis = axis
        self._group = group
        self._device = device
        self._runners: dict[int, ScheduleRunner] = {}
        self._batch: GlobalBatch | None = None
        self._scale: float | Tensor = 1.0
        self._total = torch.zeros((), device=device)
        self._backwards = 0
        self._losses: dict[int, Tensor] = {}

    @property
    def first_module(self) -> nn.Module:
        """The first module with outputs that this rank uses."""
        return self._stages.first_module

    @property
    def losses(self) -> list[Tensor]:
        return [self._losses[number] for number in sorted(self._losses)]

    @property
    def _has_last(self) -> bool:
        return self._stages.count - 1 in self._stages.own

    def accumulate(self, batch: GlobalBatch, seed_scale: float | Tensor, announce: Callable[[Tensor], None]) -> None:
        """Accumulate the gradient. Losses are known on the last stage's rank; the others announce zero."""
        micro_batches = batch.micro_batches
        with self._autocast():
            specs = [self._stages.activation_specs(micro_batch.inputs) for micro_batch in micro_batches]
        runner = self._runner(len(micro_batches), specs[0])
        self._batch, self._scale, self._losses = batch, seed_scale, {}
        self._total = torch.zeros((), device=self._device)
        self._backwards = len(micro_batches) * len(self._stages.own)
        try:
            with self._step.sync_context(False), self._clock.phase(Phase.BACKWARD):  # what isn't a forward or a wait
                runner.run(specs)
        except Failure:
            raise
        except Exception as error:
            note_location(error, "backward", f"in the pipeline's schedule of update {batch.step + 1}")
            raise
        finally:
            self._batch = None
        announce(self._total)

    def _runner(self, micro_batches: int, specs: Sequence[ActivationSpec]) -> ScheduleRunner:
        if micro_batches not in self._runners:
            stages = [
                StageOfSchedule(
                    number,
                    self._stages.count,
                    self._device,
                    self._group,
                    self._compute,
                    list(self._stages.parameters_of(number)),
                    specs,
                    self._sync_context,
                )
                for number in self._stages.own
            ]
            self._runners[micro_batches] = ScheduleRunner(self._schedule, stages, self._axis.size, micro_batches)
        return self._runners[micro_batches]

    def _compute(self, stage: int, activation: Tensor | None, number: int) -> Any:
        batch = self._batch
        assert batch is not None, "a stage computes in an update"
        micro_batch = batch.micro_batches[number]
        self._key_draws(batch, number, stage)
        try:
            with muted_padding(micro_batch, self._muted), self._clock.phase(Phase.FORWARD):
                with self._autocast():
                    output = self._stages.run(stage, activation, micro_batch.inputs)
                if stage < self._stages.count - 1:
                    return output
                loss = self._objective.loss_sum(output, micro_batch)
                if batch.step == number == 0:
                    refuse_loss(loss)
                if not micro_batch.samples:
                    self._losses[number] = loss.detach() * 0.0
                    return loss * 0.0
                self._losses[number] = loss.detach()
                self._total = self._total + loss.detach()
                return loss * self._scale  # the backward starts from it
        except Exception as error:
            micro = f"micro-batch {number + 1} of {len(batch.micro_batches)}, update {batch.step + 1}"
            note_location(error, "forward", f"in stage {stage + 1}'s forward pass of {micro}")
            raise

    def check(self, inputs: Inputs) -> None:
        """Determine what stages pass on, before the first update. All ranks of the pipeline together."""
        failure: Exception | None = None
        try:
            with self._autocast():
                passed_on = str(self._stages.activation_specs(inputs))
        except Exception as error:
            failure, passed_on = error, first_line(error)
        of_ranks = self._axis.gather((failure is None, passed_on))
        if failure is not None:
            raise failure
        other = next((item for item in cast("Any", of_ranks) if item != (True, passed_on)), None)
        if other is not None:
            raise no_chain(f"a stage passes on {passed_on}, and for another stage it is {other[1]}")

    def run_alone(self, stage: int, batch: Batch) -> object:
        """Return a stage's output for noise, without the other stages."""
        noise = torch.Generator().manual_seed(stage)
        with self._autocast():
            spec = self._stages.activation_specs(batch.inputs)[stage]
            activation = torch.randn(spec.shape, generator=noise).to(self._device, spec.dtype).requires_grad_()
            return self._stages.run(stage, activation if stage else None, batch.inputs)

    def _sync_context(self) -> AbstractContextManager[object]:
        self._backwards -= 1
        return self._step.sync_context(self._backwards == 0)

    # --- evaluation -----------------------------------------------------------------------------------------------

    @torch.no_grad()
    def outputs(self, inputs: Inputs) -> object:
        stages, output = self._stages, cast("Any", None)
        with self._autocast():
            specs = stages.activation_specs(inputs)
            for stage in stages.own:
                activation = None
                if stage > 0:
                    spec, source = specs[stage], stages.owners[stage - 1]
                    activation = output
                    if source != self._axis.rank:
                        buffer = torch.empty(spec.shape, dtype=spec.dtype, device=self._device)
                        activation = receive(buffer, self._group, source)
                output = stages.run(stage, activation, inputs)
                if stage < stages.count - 1 and stages.owners[stage + 1] != self._axis.rank:
                    send(output, self._group, stages.owners[stage + 1])
        return output if self._has_last else None

    def evaluate(self, micro_batches: Iterable[Batch], observe: Observe = unobserved) -> Mapping[str, Tensor]:
        """Return the sums, the same on all ranks of the pipeline."""
        sums = sum_over(self._stages.model, micro_batches, partial(self._sums, observe), self._muted)
        numbers = {name: value.item() for name, value in sums.items()} if self._has_last else None
        last_numbers: Any = self._axis.gather(numbers)[self._stages.owners[-1]]
        return {name: torch.tensor(value, dtype=torch.float64) for name, value in last_numbers.items()}

    def _sums(self, observe: Observe, batch: Batch) -> dict[str, Tensor]:
        outputs = self.outputs(batch.inputs)
        if not self._has_last:
            return {}
        observe(self._objective, outputs, batch)
        return sums_of_outputs(self._objective, outputs, batch)
