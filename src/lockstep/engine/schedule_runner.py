"""torch's pipeline stages and schedules, for micro-batches of unequal shapes: uses private names of torch.

torch's stage keeps the shape of its first micro-batch; this one gets each micro-batch's before an update.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining import _utils as pipelining_utils
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.distributed.pipelining.stage import _RecvInfo

from lockstep.core.errors import ConfigError, Problem

if TYPE_CHECKING:
    from lockstep.engine.stages import ActivationSpec
    from lockstep.plan.stages import Schedule

_describe: Any = getattr(pipelining_utils, "extract_tensor_metas", None)  # torch 2.13 has it

Compute = Callable[[int, "Tensor | None", int], Any]
"""(stage, activation of the stage before, micro-batch) -> output; the last stage's is the loss, already scaled."""

_SINGLE: Mapping[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_MULTI: Mapping[str, type[PipelineScheduleMulti]] = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


class StageOfSchedule(PipelineStage):
    """One stage, as torch's schedules run it.

    Args:
        specs: The activation specs of a first micro-batch, by stage.
        sync_context: Makes the context of a backward.
    """

    def __init__(
        self,
        number: int,
        stages: int,
        device: torch.device,
        group: dist.ProcessGroup,
        compute: Compute,
        parameters: Sequence[nn.Parameter],
        specs: Sequence[ActivationSpec],
        sync_context: Callable[[], AbstractContextManager[object]],
    ) -> None:
        if _describe is None:
            message = f"pipelines need torch 2.13, and this is {torch.__version__}"
            raise ConfigError(Problem("", "parallel.pipeline", message))

        def example(spec: ActivationSpec) -> Tensor:
            return torch.empty(spec.shape, dtype=spec.dtype, device=device, requires_grad=True)

        given = torch.empty(0, device=device) if number == 0 else example(specs[number])
        output = torch.empty((), device=device) if number == stages - 1 else example(specs[number + 1])
        part = _StageModule(number, compute, parameters)
        super().__init__(part, number, stages, device, input_args=given, output_args=output, group=group)
        self._sync_context = sync_context

    def expect(self, specs: Sequence[Sequence[ActivationSpec]]) -> None:
        """Set the activation specs of the next update, by micro-batch and stage."""
        own = self.stage_index
        for number, of_micro_batch in enumerate(specs):
            if not self.is_first:
                self.args_recv_info[number] = (self._receives(of_micro_batch[own], "activation", own - 1, grad=True),)
            if not self.is_last:
                gradient = self._receives(of_micro_batch[own + 1], "gradient", own + 1, grad=False)
                self.grad_recv_info[number] = (gradient,)

    def _receives(self, spec: ActivationSpec, what: str, source: int, *, grad: bool) -> _RecvInfo:
        buffer = torch.empty(spec.shape, dtype=spec.dtype, device=self.device)
        metas = _describe((buffer.detach().requires_grad_(grad),))
        name = f"{what} from stage {source}"
        return _RecvInfo(name, source=source, buffer=buffer, tensor_meta=cast("Any", metas)[0])

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        """Run a backward as torch does, in the sync context if it computes gradients of weights."""
        if backward_type == "input":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        with self._sync_context():
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)


class _StageModule(nn.Module):
    """The module that torch calls; the weights remain the model's."""

    def __init__(self, number: int, compute: Compute, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._number = number
        self._compute = compute
        self._own = list(parameters)

    def forward(self, activation: Tensor, *, micro_batch: int) -> Any:
        return self._compute(self._number, activation if self._number else None, micro_batch)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return (parameter for parameter in self._own if parameter.requires_grad)


class ScheduleRunner:
    """A schedule for updates of one number of micro-batches, over this rank's stages; `ranks` are the pipeline's."""

    def __init__(self, schedule: Schedule, stages: Sequence[StageOfSchedule], ranks: int, micro_batches: int) -> None:
        self._stages = stages
        self._given = [(torch.empty(0, device=stages[0].device),)] * micro_batches
        self._numbers = [{"micro_batch": number} for number in range(micro_batches)]
        kind = schedule_class(schedule, micro_batches, ranks)
        if issubclass(kind, PipelineScheduleSingle):
            self._schedule: Any = kind(stages[0], micro_batches, _loss_of_stage, scale_grads=False)
            connect: Any = self._schedule._initialize_stage
        else:
            self._schedule = kind(list(stages), micro_batches, _loss_of_stage, scale_grads=False)
            connect = self._schedule._initialize_stages
        self._schedule._has_backward = True
        for stage in stages:
            stage.has_backward = True
        connect(self._given[0], self._numbers[0])  # as in torch's first step; afterwards specs can be set

    def run(self, specs: Sequence[Sequence[ActivationSpec]]) -> None:
        """Make one update, with these activation specs by micro-batch and stage.

        An error of a stage is raised without torch's wrapper, which hides its message.
        """
        for stage in self._stages:
            stage.expect(specs)
            stage.has_backward = True
            stage.clear_runtime_states()
        targets = list(range(len(self._numbers)))
        try:
            self._schedule._step_microbatches(self._given, self._numbers, targets, None, return_outputs=False)
            return
        except RuntimeError as error:
            raised = _without_wrapper(error)
        raise raised  # outside of the block, so that the wrapper isn't its context


def _without_wrapper(error: BaseException) -> BaseException:
    """Return the exception that torch's pipelining has wrapped, or `error` itself."""
    while isinstance(error.__cause__, Exception) and _raised_by_torch(error):
        error = error.__cause__
    return error


def _raised_by_torch(error: BaseException) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__")).startswith("torch.distributed.pipelining")


def _loss_of_stage(loss: Tensor, micro_batch: int) -> Tensor:
    """Return the loss, which the last stage has computed: the model's outputs need not be tensors."""
    return loss


def schedule_class(
    schedule: Schedule, micro_batches: int, ranks: int
) -> type[PipelineScheduleSingle] | type[PipelineScheduleMulti]:
    """Return torch's class for an update of N micro-batches.

    All forwards run first if there are too few of them, such as in an epoch's last update, or if rounds don't divide
    their number: the same gradients, a longer bubble.
    """
    if schedule in _SINGLE:
        return _SINGLE[schedule] if micro_batches >= ranks else ScheduleGPipe
    rounds = max(1, micro_batches // ranks)
    if schedule != "zbv" and (micro_batches < ranks or micro_batches % rounds):
        return ScheduleLoopedBFS
    return _MULTI[schedule]
