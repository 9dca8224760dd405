"""The schedules of torch for updates of any number of micro-batches."""

from __future__ import annotations

from typing import cast

import pytest
import torch
import torch.distributed as dist
from kit.small import in_group
from kit.worlds import in_world
from torch import Tensor, nn
from torch.distributed.pipelining import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)

from lockstep.engine.schedule_runner import ScheduleRunner, StageOfSchedule, schedule_class
from lockstep.engine.stages import ActivationSpec

CASES = [
    ("gpipe", 2, 4, ScheduleGPipe),
    ("1f1b", 4, 4, Schedule1F1B),
    ("1f1b", 3, 4, ScheduleGPipe),
    ("interleaved-1f1b", 8, 4, ScheduleInterleaved1F1B),
    ("interleaved-1f1b", 9, 4, ScheduleLoopedBFS),
    ("interleaved-1f1b", 2, 4, ScheduleLoopedBFS),
    ("zbv", 2, 4, ScheduleZBVZeroBubble),
]


@pytest.mark.parametrize(("schedule", "micro_batches", "ranks", "expected"), CASES)
def test_an_update_of_too_few_or_uneven_micro_batches_runs_all_forwards_first(
    schedule: str, micro_batches: int, ranks: int, expected: type
) -> None:
    assert schedule_class(schedule, micro_batches, ranks) is expected  # type: ignore[arg-type]


LENGTHS = ((3, 5, 2), (4, 1, 6))


def _gradients() -> list[float]:
    """Return the gradient of this rank's weight in two updates of micro-batches of unequal lengths."""
    with in_group():
        rank, cpu = dist.get_rank(), torch.device("cpu")
        weight = nn.Parameter(torch.tensor(2.0 + rank))

        def compute(stage: int, activation: Tensor | None, number: int) -> Tensor:
            given = torch.full((lengths[number],), 1.0 + number) if activation is None else activation
            made = given * weight
            return made.sum() if stage == 1 else made

        lengths: tuple[int, ...] = LENGTHS[0]
        specs = [[ActivationSpec((length,), torch.float32)] * 2 for length in lengths]
        contexts = torch.enable_grad
        stage = StageOfSchedule(rank, 2, cpu, dist.group.WORLD, compute, [weight], specs[0], contexts)
        runner = ScheduleRunner("1f1b", [stage], 2, 3)
        gradients = []
        for lengths in LENGTHS:
            weight.grad = None
            runner.run([[ActivationSpec((length,), torch.float32)] * 2 for length in lengths])
            gradients.append(float(weight.grad))
        return gradients


def test_micro_batches_of_unequal_lengths_need_no_padding() -> None:
    sums = [sum(length * (1.0 + number) for number, length in enumerate(lengths)) for lengths in LENGTHS]
    assert in_world(2, _gradients) == [[3.0 * total for total in sums], [2.0 * total for total in sums]]


class FailsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, given: Tensor) -> Tensor:
        return given.clone()

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        raise ValueError("in the backward")


def _raised(where: str) -> tuple[str, str, str]:
    """Return class, message and origin of what an update raises whose only stage fails."""

    def compute(stage: int, activation: Tensor | None, number: int) -> Tensor:
        if where == "forward":
            raise KeyError("in the forward") from OSError("the user's cause")
        return cast("Tensor", FailsBackward.apply(weight)).sum()

    with in_group():
        weight = nn.Parameter(torch.ones(2))
        specs = [ActivationSpec((2,), torch.float32)]
        group = cast("dist.ProcessGroup", dist.group.WORLD)
        stage = StageOfSchedule(0, 1, torch.device("cpu"), group, compute, [weight], specs, torch.enable_grad)
        try:
            ScheduleRunner("gpipe", [stage], 1, 1).run([specs])
        except Exception as error:
            return type(error).__name__, str(error.args[0]), str(error.__cause__)
    return "", "", ""


def test_a_stage_s_exception_is_raised_without_torch_s_wrapper() -> None:
    assert in_world(1, _raised, "forward") == [("KeyError", "in the forward", "the user's cause")]
    assert in_world(1, _raised, "backward") == [("ValueError", "in the backward", "None")]
