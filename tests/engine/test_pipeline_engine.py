"""The gradient of an update through stages: which backward reduces, which losses count."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from engine.test_eager import PADDING, Objective, Recorder, SumOfPoints, batch, global_batch
from torch import Tensor

from lockstep.core.errors import ConfigError
from lockstep.distributed.collectives import LocalGroup
from lockstep.engine.pipeline import PipelineEngine


class Stages:
    """Two stages on one rank: the first returns the sum of its points, the second passes it on."""

    own, count, owners = (0, 1), 2, (0, 0)

    def __init__(self) -> None:
        self.model = SumOfPoints()

    def activation_specs(self, inputs: Any) -> list[None]:
        return [None, None]

    def run(self, stage: int, activation: Any, inputs: tuple[Tensor]) -> Tensor:
        return self.model(*inputs) if stage == 0 else activation


class Runner:
    """Runs the stages of each micro-batch, and then all backwards of a stage, without a schedule."""

    def __init__(self, engine: PipelineEngine, micro_batches: int) -> None:
        self._engine, self._micro_batches = engine, micro_batches
        self.losses: list[float] = []

    def run(self, specs: Sequence[Any]) -> None:
        for number in range(self._micro_batches):
            activation = self._engine._compute(0, None, number)
            self.losses.append(float(self._engine._compute(1, activation, number)))
        for _ in range(2 * self._micro_batches):
            with self._engine._sync_context():
                pass


def engine_and_runner(step: Recorder, draws: list[Any], micro_batches: int) -> tuple[PipelineEngine, Runner]:
    rank: Any = SimpleNamespace(stages=Stages(), axis=LocalGroup(), step=step, objective=Objective())
    engine = PipelineEngine(
        rank.step,
        rank.objective,
        nullcontext,
        lambda update, number, stage: draws.append((update.step, number, stage)),
        nullcontext,
        stages=rank.stages,
        schedule="interleaved-1f1b",
        axis=rank.axis,
        group=rank.axis,
        device=torch.device("cpu"),
    )
    runner = Runner(engine, micro_batches)
    engine._runners[micro_batches] = runner  # type: ignore[assignment]
    return engine, runner


def test_the_last_backward_of_all_stages_and_micro_batches_reduces() -> None:
    step, draws, announced = Recorder(SumOfPoints()), [], []
    engine, _ = engine_and_runner(step, draws, 2)
    engine.accumulate(global_batch(batch(1.0), batch(4.0)), 1.0, lambda total: announced.append(len(step.events)))
    assert step.events == ["not last", *["not last", "kept"] * 3, "last", "reduced", "kept"], (
        "in the schedule's context"
    )
    assert announced == [len(step.events)]
    assert draws == [(7, number, stage) for number in range(2) for stage in range(2)]


def test_losses_are_scaled_in_the_last_stage_and_padding_samples_weigh_nothing() -> None:
    announced: list[float] = []
    engine, runner = engine_and_runner(Recorder(SumOfPoints()), [], 3)
    update = global_batch(batch(1.0, 2.0), batch(4.0), PADDING)
    engine.accumulate(update, 0.25, lambda total: announced.append(float(total)))
    assert runner.losses == [0.75, 1.0, 0.0]
    assert announced == [7.0]


def test_an_evaluation_runs_own_stages_one_after_the_other() -> None:
    engine, _ = engine_and_runner(Recorder(SumOfPoints()), [], 1)
    evaluated = engine.evaluate([batch(1.0, 2.0), PADDING, batch(4.0)])
    assert {name: value.item() for name, value in evaluated.items()} == {"loss_sum": 7.0, "count": 3.0, "half": 3.5}


@pytest.mark.parametrize("other", [(False, "RuntimeError: out of order"), (True, "[None]")])
def test_a_check_that_fails_on_another_rank_or_finds_something_else_there_fails_here(other: tuple[bool, str]) -> None:
    engine, _ = engine_and_runner(Recorder(SumOfPoints()), [], 1)
    engine.check((torch.zeros(1),))
    engine._axis = cast("Any", SimpleNamespace(gather=lambda own: [own, other]))
    with pytest.raises(ConfigError, match=re.escape(other[1])):
        engine.check((torch.zeros(1),))


@pytest.mark.parametrize("raised", [ConfigError("no chain"), ValueError("the user's")])
def test_a_failure_in_a_stage_has_its_update(raised: Exception) -> None:
    class Failing:
        def run(self, specs: Any) -> None:
            raise raised

    engine, _ = engine_and_runner(Recorder(SumOfPoints()), [], 1)
    engine._runners[1] = Failing()  # type: ignore[assignment]
    with pytest.raises(type(raised)) as failed:
        engine.accumulate(global_batch(batch(1.0)), 1.0, lambda total: None)
    assert bool(getattr(failed.value, "__notes__", ())) is not isinstance(raised, ConfigError)
    assert engine._batch is None
