"""torch's pipeline stages and schedules, with micro-batches of unequal shapes. All that is private of them is here.

A stage of torch keeps the shape of the first micro-batch it saw. Here it is told, before each update, what each
micro-batch will hand on, so that ragged text needs no padding beyond that of its own micro-batch.
"""

from __future__ import annotations

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
from torch.distributed.pipelining._utils import extract_tensor_metas
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle
from torch.distributed.pipelining.stage import _RecvInfo

if TYPE_CHECKING:
    from lockstep.engine.cutting import Hidden
    from lockstep.plan.stages import Schedule

Compute = Callable[[int, "Tensor | None", int], Any]
"""(stage, what the stage before has sent, micro-batch) -> what goes on; of the last, what the backward starts from."""

_SINGLE: Mapping[str, type[PipelineScheduleSingle]] = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B}
_MULTI: Mapping[str, type[PipelineScheduleMulti]] = {
    "interleaved-1f1b": ScheduleInterleaved1F1B,
    "zero-bubble": ScheduleInterleavedZeroBubble,
    "zbv": ScheduleZBVZeroBubble,
}


class Stage(PipelineStage):
    """Args:
    parameters: of the stage.
    window: around a backward; told whether it is this rank's last of the update.
    """

    def __init__(
        self,
        number: int,
        stages: int,
        device: torch.device,
        group: dist.ProcessGroup,
        compute: Compute,
        parameters: Sequence[nn.Parameter],
        handed: Sequence[Hidden],
        window: Callable[[], AbstractContextManager[object]],
    ) -> None:
        given = torch.empty(0, device=device) if number == 0 else _example(handed[number], device)
        made = torch.empty((), device=device) if number == stages - 1 else _example(handed[number + 1], device)
        part = _Part(number, compute, parameters)
        super().__init__(part, number, stages, device, input_args=given, output_args=made, group=group)
        self._window = window

    def expect(self, handed: Sequence[Sequence[Hidden]]) -> None:
        """What each stage will be handed of each micro-batch of the next update."""
        mine = self.stage_index
        for number, given in enumerate(handed):
            if not self.is_first:
                self.args_recv_info[number] = (self._to_come(given[mine], "activation", mine - 1, grad=True),)
            if not self.is_last:
                self.grad_recv_info[number] = (self._to_come(given[mine + 1], "gradient", mine + 1, grad=False),)

    def _to_come(self, hidden: Hidden, what: str, source: int, *, grad: bool) -> _RecvInfo:
        buffer = torch.empty(hidden.shape, dtype=hidden.dtype, device=self.device)
        metas = extract_tensor_metas((buffer.detach().requires_grad_(grad),))
        name = f"{what} from stage {source}"
        return _RecvInfo(name, source=source, buffer=buffer, tensor_meta=cast("Any", metas)[0])

    def backward_maybe_with_nosync(
        self, backward_type: Any, bwd_kwargs: dict[str, Any], last_backward: bool = False
    ) -> Any:
        if backward_type == "input":
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)
        with self._window():
            return super().backward_maybe_with_nosync(backward_type, bwd_kwargs, last_backward)


def _example(hidden: Hidden, device: torch.device) -> Tensor:
    return torch.empty(hidden.shape, dtype=hidden.dtype, device=device, requires_grad=True)


class _Part(nn.Module):
    """What torch calls. The weights stay the model's."""

    def __init__(self, number: int, compute: Compute, parameters: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self._number = number
        self._compute = compute
        self._own = list(parameters)

    def forward(self, hidden: Tensor, *, micro_batch: int) -> Any:
        return self._compute(self._number, hidden if self._number else None, micro_batch)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return (one for one in self._own if one.requires_grad)


class Order:
    """A schedule for updates of so many micro-batches, over this rank's stages.

    Args:
        ranks: of the pipeline.
    """

    def __init__(self, schedule: Schedule, stages: Sequence[Stage], ranks: int, micro_batches: int) -> None:
        self._stages = stages
        self._micro_batches = micro_batches
        self._given = [(torch.empty(0, device=stages[0].device),)] * micro_batches
        self._numbers = [{"micro_batch": number} for number in range(micro_batches)]
        if schedule in _SINGLE:
            kind = _SINGLE[schedule] if micro_batches >= ranks else ScheduleGPipe  # 1f1b would never be in full flow
            self._run: Any = kind(stages[0], micro_batches, _computed, scale_grads=False)
            return
        self._run = _multi(schedule, micro_batches, ranks)(list(stages), micro_batches, _computed, scale_grads=False)

    def run(self) -> None:
        """One update: all forwards and backwards of this rank's stages."""
        for stage in self._stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        self._run._step_microbatches(
            self._given, self._numbers, list(range(self._micro_batches)), None, return_outputs=False
        )

    def prepare(self) -> None:
        """What torch does in a first step: connects neighbours. Afterwards stages can be told what to expect."""
        self._run._has_backward = True
        for stage in self._stages:
            stage.has_backward = True
        single = isinstance(self._run, PipelineScheduleSingle)
        connect: Any = self._run._initialize_stage if single else self._run._initialize_stages
        connect(self._given[0], self._numbers[0])


def _computed(loss: Tensor, micro_batch: int) -> Tensor:
    """The last stage makes it, whose outputs need not be tensors."""
    return loss


def _multi(schedule: Schedule, micro_batches: int, ranks: int) -> type[PipelineScheduleMulti]:
    """An update of too few micro-batches, such as an epoch's last, or of a number that rounds don't divide, goes
    through all forwards first: the same gradients, a longer wait."""
    rounds = max(1, micro_batches // ranks)
    if schedule != "zbv" and (micro_batches < ranks or micro_batches % rounds):
        return ScheduleLoopedBFS
    return _MULTI[schedule]
