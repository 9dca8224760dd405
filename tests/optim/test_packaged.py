"""Optimizers of other packages by their names: adamw-8bit (bitsandbytes), schedule-free (schedulefree)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.failures import fails
from kit.runs import recorded, state_after
from training.test_same_run import config

import lockstep
from lockstep.config.loading import validate
from lockstep.core.errors import ConfigError
from lockstep.core.records import ParameterFacts
from lockstep.plan.optimizers import OPTIMIZERS

NAMES = ("adamw-8bit", "schedule-free")


def settings(name: str, **sections: Any) -> dict[str, Any]:
    made = config(12, optim={"name": name, "lr": 3e-3}, **sections)
    return {**made, "model": {**made["model"], "vocabulary": 256}}  # an embedding of 8,192 elements


@pytest.mark.parametrize("name", NAMES)
def test_a_resume_is_bitwise_equal(name: str, tmp_path: Path) -> None:
    whole = state_after(settings(name), tmp_path / "whole", 5)
    state_after(settings(name), tmp_path / "parts", 2)
    resumed = state_after(settings(name), tmp_path / "parts", 5)
    assert resumed.pop("values") == whole.pop("values")
    assert resumed.keys() == whole.keys()
    assert all(torch.equal(resumed[key], tensor) for key, tensor in whole.items())
    assert any(key.startswith("evaluated.") for key in whole) is (name == "schedule-free")


@pytest.mark.parametrize("name", NAMES)
def test_they_learn_as_adamw_does(name: str) -> None:
    steps = {"run": {"steps": 30}, "schedule": {"kind": "constant"}}
    adamw = recorded(settings("adamw", **steps), updates=30)
    run = recorded(settings(name, **steps), updates=30)
    assert run.losses == pytest.approx(adamw.losses, rel=0.02 if name == "adamw-8bit" else 0.2)
    assert run.losses[-1] < adamw.losses[0] - 0.3


def test_moments_in_8_bits_are_counted(tmp_path: Path) -> None:
    state = state_after(settings("adamw-8bit"), tmp_path, 1)
    name = next(key for key in state if key.startswith("optimizer.state1.embedding"))
    assert state[name].dtype is torch.uint8
    entries = ("state1", "state2", "absmax1", "absmax2", "qmap1", "qmap2")
    held = sum(state[name.replace("state1", entry)].nbytes for entry in entries)
    facts = ParameterFacts("embedding.weight", tuple(state[name].shape), 4, True, "float32")
    assert OPTIMIZERS["adamw-8bit"].state_bytes(facts, validate(settings("adamw-8bit")).config.optim) == held


def test_schedule_free_has_no_schedule() -> None:
    assert validate(settings("schedule-free")).config.schedule.kind == "constant"
    assert validate(settings("adamw")).config.schedule.kind == "cosine"
    with fails(ConfigError, "cosine", "schedule-free", "constant"):
        validate(settings("schedule-free", schedule={"kind": "cosine"}))


def test_a_package_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "schedulefree", None)
    with (
        fails(ConfigError, "schedule-free", "optimizers", key="optim.name"),
        lockstep.session(settings("schedule-free")),
    ):
        pass


def test_schedule_free_under_fsdp_is_the_single_process() -> None:
    alone = recorded(settings("schedule-free"), updates=3)
    run = recorded(settings("schedule-free", parallel={"strategy": "fsdp"}), ranks=2, updates=3)
    assert run.losses == pytest.approx(alone.losses, rel=1e-5)
    [held_out], [expected] = run.evaluations, alone.evaluations
    assert held_out["loss"] == pytest.approx(expected["loss"], rel=1e-5)
