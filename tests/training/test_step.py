"""The step for models and objectives, and the note on a forward that counts itself."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kit import small

import lockstep
from lockstep.core.records import Batch

STEPS: list[int] = []


class Annealed(small.CrossEntropy):
    """Its loss grows with the step."""

    def loss_sum(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        STEPS.append(lockstep.step())
        return super().loss_sum(outputs, batch) * (1 + 0.1 * lockstep.step())


class Counting(small.Net):
    """Its outputs depend on the number of its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        return super().forward(points) * (1 + 0.1 * self.forwards)


def losses(micro_size: int, **given: Any) -> list[float]:
    config = small.config(batch={"global_size": 12, "micro_size": micro_size}, run={"steps": 3})
    if "objective" in given:
        del config["objective"]
    if "model" in given:
        del config["model"]
    with lockstep.session(config, **given) as session:
        found = [report.loss for report in session]
        STEPS.append(-1)
        session.evaluate()
    return found


def test_the_step_is_that_of_the_update_in_each_micro_batch_and_of_the_state_in_evaluations() -> None:
    found = []
    for micro_size, number in ((3, 4), (12, 1)):
        STEPS.clear()
        found.append(losses(micro_size, objective=Annealed()))
        end = STEPS.index(-1)
        assert set(STEPS[end + 1 :]) == {3}
        later = [step for step in STEPS[:end] if step]  # a first use is checked
        assert later == [step for step in range(1, 3) for _ in range(number)]
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_the_step_continues_after_a_resume(tmp_path: Any) -> None:
    for steps in (2, 4):
        STEPS.clear()
        config = small.config(run={"steps": steps, "folder": str(tmp_path / "run")}, evaluation={"at_end": False})
        del config["objective"]
        lockstep.train(config, objective=Annealed())
    assert STEPS[-2:] == [2, 3]


@pytest.mark.parametrize(
    ("model", "micro_size", "notes"), [(Counting, 3, 1), (Counting, 12, 0), (small.WithBatchNorm, 4, 0)]
)
def test_buffers_that_each_micro_batch_changes_are_noted(
    model: Any, micro_size: int, notes: int, capsys: pytest.CaptureFixture[str]
) -> None:
    losses(micro_size, model=model)
    printed = capsys.readouterr().out
    assert printed.count(" forwards in each of 4 ") == notes
    assert printed.count("the forward changes") == notes
