"""Runs that learn nothing fail, and a state that isn't finite is neither saved nor blamed on samples."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import small
from kit.failures import fails, gives
from kit.worlds import in_world

import lockstep
from lockstep.core.errors import ReplicasDiffer
from lockstep.core.records import Batch
from lockstep.loop.replicas import StateNotFinite
from lockstep.loop.session import components_of


class Labeled(small.CrossEntropy):
    """Its samples have no labels after some micro-batches."""

    def __init__(self, batches: int) -> None:
        self._left = 2 * batches  # each is counted twice

    def count(self, batch: Batch) -> int:
        self._left -= 1
        return batch.samples if self._left >= 0 else 0

    def loss_sum(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return super().loss_sum(outputs, batch) * (self._left >= 0)


@pytest.mark.parametrize("labeled", [0, 1])
def test_a_run_whose_labels_are_missing_fails(labeled: int, tmp_path: Path) -> None:
    config = small.config(run={"steps": 8, "folder": str(tmp_path / "run")}, evaluation={"at_end": False})
    with fails(lockstep.ConfigError, "updates", "target", key="data.train") as raised:
        lockstep.train(config, objective=Labeled(labeled))
    assert ("all 8" in str(raised.value)) == (labeled == 0)
    assert not (tmp_path / "run" / "summary.json").exists()
    assert not [*(tmp_path / "run" / "checkpoints").glob("step-*")]


def test_a_run_without_any_label_fails_in_its_first_updates(tmp_path: Path) -> None:
    with fails(lockstep.ConfigError, "all 10", key="data.train"):
        lockstep.train(small.config(run={"steps": 60, "folder": str(tmp_path / "run")}), objective=Labeled(0))


class Broken(torch.optim.SGD):
    """Makes a weight NaN in its fifth step."""

    steps = 0

    def step(self, closure: Any = None) -> None:
        super().step()
        self.steps += 1
        if self.steps == 5:
            parameter = self.param_groups[0]["params"][0]
            getattr(parameter, "_local_tensor", parameter.data).view(-1)[:1] = math.nan


def broken(strategy: str, folder: Path, every: str) -> tuple[str, str, bool]:
    config = small.config(
        parallel={"strategy": strategy}, run={"steps": 8, "folder": str(folder)}, checkpoint={"every": every}
    )
    try:
        lockstep.train(config, optimizer=Broken)
    except lockstep.RunFailed as failure:
        return str(failure), str(getattr(failure, "__notes__", "")), isinstance(failure, StateNotFinite)
    return "", "", False


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_a_step_that_makes_a_parameter_nan_is_named_instead_of_samples(strategy: str, tmp_path: Path) -> None:
    ranks = 1 if strategy == "single" else 2
    for message, notes, is_state in in_world(ranks, broken, strategy, tmp_path / "run", "3 steps"):
        assert is_state
        assert gives(message, "inner.weight", "since update 5")
        assert "suspected" not in message
        assert "saved" not in notes
    assert [path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")] == ["step-00000003"]


def test_a_state_that_is_not_finite_is_not_saved(tmp_path: Path) -> None:
    message, *_ = in_world(1, broken, "single", tmp_path / "run", "5 steps")[0]
    assert gives(message, "inner.weight", "after update 5")
    assert not [*(tmp_path / "run" / "checkpoints").glob("step-*")]


def flipped(bit: int, folder: Path) -> tuple[str, tuple[int, ...]]:
    """A bit of a weight flips on rank 1 alone."""
    import torch.distributed as dist

    with small.in_group(), lockstep.session(small.config(parallel={"strategy": "ddp"})) as session:
        checkpoints = session.checkpoints(folder)
        try:
            for report in session:
                if report.step == 2:
                    checkpoints.save()
                    checkpoints.finish()
                if report.step == 5 and dist.get_rank() == 1:
                    weight = components_of(session).sharding.state.model.head.weight
                    weight.data.view(-1)[:1].view(torch.int32).bitwise_or_(bit)
        except ReplicasDiffer as failure:
            return str(failure), failure.ranks
    return "", ()


@pytest.mark.parametrize("bits", [0x7F800000, 0x7F800001])  # infinity, NaN
def test_copies_are_compared_after_an_update_that_is_not_finite(bits: int, tmp_path: Path) -> None:
    for message, _ranks in in_world(2, flipped, bits, tmp_path):
        assert gives(message, "update 6", "ranks 0 and 1", "model.head.weight")
    assert [path.name for path in tmp_path.glob("step-*")] == ["step-00000002"]
