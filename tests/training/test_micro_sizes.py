"""How small micro-batches can become, and whose size is halved."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kit import small
from kit.failures import gives
from test_smaller_batches import config_of, sizes

import lockstep
from lockstep.core.errors import OutOfMemory
from lockstep.core.failure_kinds import FailureKind
from lockstep.launch.ends import End
from lockstep.loop.out_of_memory import least_micro_size
from lockstep.monitor.attempts import read_attempts
from lockstep.plan.batch import plan_batch
from lockstep.resilience.faults import FAULTS, Fault, write_plan


def test_batch_norm_is_left_more_than_one_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of 3 would be 2 and 1."""
    plan, folder = tmp_path / "plan.json", tmp_path / "run"
    write_plan(plan, [Fault("oom", 0, 2, "backward", above=2)])
    monkeypatch.setenv(FAULTS, str(plan))
    config = {**small.config("WithBatchNorm", run={"steps": 3, "folder": str(folder)}), "batch": {"global_size": 3}}
    with pytest.raises(OutOfMemory, match="smaller micro-batches are impossible"):
        lockstep.train(config)
    assert read_attempts(folder)[-1].number("least_micro_size") == 3
    monkeypatch.delenv(FAULTS)
    lockstep.train(config)


@pytest.mark.parametrize(("size", "least", "halves"), [(3, 3, False), (4, 2, True), (3, 1, True)])
def test_a_killed_rank_leaves_batch_norm_more_than_one_sample(
    tmp_path: Path, size: int, least: int, halves: bool
) -> None:
    rounds = sizes(tmp_path, config_of(size))
    begin_attempt(tmp_path, micro_size=size, least_micro_size=least)
    assert bool(rounds.after(End(FailureKind.HOST_MEMORY, "killed", 0.0))) == halves


@pytest.mark.parametrize("evaluation", ["auto", 6])
def test_a_rank_that_is_killed_in_an_evaluation(tmp_path: Path, evaluation: object) -> None:
    rounds = sizes(tmp_path, config_of(8, evaluation={"every": "2 steps", "micro_size": evaluation}))
    begin_attempt(tmp_path, micro_size=8, evaluation_size=6)
    killed = End(FailureKind.HOST_MEMORY, "killed", 0.0, evaluates=True)
    assert gives(rounds.after(killed) or "", "evaluation.micro_size", 3, 6)
    assert rounds.job.config.batch.micro_size == 8


def begin_attempt(folder: Path, **facts: int) -> None:
    line = {"launched": 0.0, "began": 1.0, "step": 0, "seconds": 0.0, "hosts": [["a", 2]], **facts}
    (folder / "attempts.jsonl").write_text(json.dumps(line) + "\n")


@pytest.mark.parametrize(
    ("model", "share", "epoch_samples", "steps", "least"),
    [
        (small.Net(), 8, 64, 8, 1),
        (small.WithBatchNorm(), 8, 64, 8, 2),
        (small.WithBatchNorm(), 7, 56, 8, 3),  # 3 + 2 + 2; with 2 it is 2 + 2 + 2 + 1
        (small.WithBatchNorm(), 8, 67, 8, 2),  # the epoch's last update, of 3, isn't reached
        (small.WithBatchNorm(), 8, 67, 9, 3),
        (small.WithBatchNorm(), 8, 65, 9, 2),  # it has one sample with any size
        (small.WithBatchNorm().eval(), 8, 64, 8, 1),
        (torch.nn.BatchNorm2d(3), 8, 64, 8, 1),  # a sample has many values
        (torch.nn.Sequential(torch.nn.Conv1d(3, 3, 3), torch.nn.BatchNorm1d(3)), 8, 64, 8, 1),
        (torch.nn.SyncBatchNorm(3), 8, 64, 8, 1),
    ],
)
def test_the_least_size(model: torch.nn.Module, share: int, epoch_samples: int, steps: int, least: int) -> None:
    plan = SimpleNamespace(batch=plan_batch(share, "auto", 1), epoch_samples=epoch_samples, steps=steps)
    components = SimpleNamespace(plan=plan, sharding=SimpleNamespace(state=SimpleNamespace(model=model)))
    assert least_micro_size(components) == least  # type: ignore[arg-type]
