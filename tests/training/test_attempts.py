"""What a real run records of its attempts, and the goodput that follows from it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import small
from kit.worlds import in_process, in_world

import lockstep
from lockstep.monitor.attempts import read_attempts
from lockstep.monitor.goodput import goodput


class Failing(small.Net):
    """Fails once, in its 9th training forward; each takes 10 ms at least."""

    forwards = 0

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        Failing.forwards += self.training
        time.sleep(0.01 * self.training)
        if Failing.forwards == 9:
            raise RuntimeError("planted")
        return super().forward(points)


small.Failing = Failing  # type: ignore[attr-defined]  # where configs find models


def config(folder: Path, model: str = "Net", **sections: Any) -> dict[str, Any]:
    monitor = {"every": 1, "tensorboard": False, "progress": "none", "meter_seconds": 0.05}
    return small.config(model, run={"steps": 12, "folder": str(folder)}, monitor=monitor, **sections)


def fail_and_resume(folder: Path) -> None:
    section = {"every": "4 steps"}
    with pytest.raises(RuntimeError, match="planted"):
        lockstep.train(config(folder, "Failing", checkpoint=section))
    time.sleep(0.3)
    lockstep.train(config(folder, "Failing", checkpoint=section))


def test_a_run_that_failed_and_was_resumed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    in_process(fail_and_resume, folder)
    first, second = read_attempts(folder)
    assert (first.step, first.facts["strategy"], first.planned.parameters) == (0, "single", 67 * 4)
    assert second.step in (4, 8)
    assert second.ended_before < second.launched <= second.began
    assert sum(ranks for _, ranks in first.hosts) == 1
    useful = goodput(folder)
    assert useful is not None
    assert useful.attempts == 2
    assert useful.downtime >= 0.25
    assert 12 * 0.01 < useful.trained < useful.wall
    assert useful.trained + sum(useful.losses().values()) == pytest.approx(useful.wall, abs=0.01)
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["flops_per_token"] is None  # nothing is counted on a CPU


def train_on_two(folder: Path) -> None:
    lockstep.train(config(folder, parallel={"strategy": "ddp"}))


def test_two_ranks(tmp_path: Path) -> None:
    in_world(2, train_on_two, tmp_path / "run")
    (attempt,) = read_attempts(tmp_path / "run")
    assert [ranks for _, ranks in attempt.hosts] == [2]
    assert attempt.facts["ranks"] == 2
