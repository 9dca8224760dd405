"""A fault is noted when it has its effect, and a round whose fault has none doesn't pass."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit import small
from torch import nn

from lockstep.chaos.drawing import draw_fault
from lockstep.chaos.rounds import has_effect
from lockstep.core.phase_clock import Phase, PhaseClock
from lockstep.core.planted import plant_unreadable, unreadable_samples
from lockstep.resilience.disk_faults import newest_of_two
from lockstep.resilience.faults import FAULTS, Fault, events_of, plant, write_plan
from lockstep.resilience.memory_faults import Trained


def planted(plan: Path, fault: Fault, model: nn.Module | None = None) -> PhaseClock:
    """Plant a fault of rank 0 in this process; return the rank's clock."""
    write_plan(plan, [fault])
    clock, trained_in = PhaseClock(), None
    if model is not None:
        trained = Trained(model, None, lambda training: 8, lambda step: (8 * step - 8, 8 * step), model)  # type: ignore[arg-type]
        trained_in = lambda: trained  # noqa: E731
    plant(SimpleNamespace(rank=0, clock=clock), 0, {FAULTS: str(plan)}, trained_in)  # type: ignore[arg-type]
    return clock


def fired(plan: Path) -> list[int]:
    return [event["step"] for event in events_of(plan) if event["event"] == "fired"]


def test_a_nan_is_noted_with_the_forward_that_makes_it(tmp_path: Path) -> None:
    model, plan, points = small.Net(), tmp_path / "plan.json", torch.ones(2, 4)
    clock = planted(plan, Fault("nan", 0, 1, "optimizer"), model)
    clock.enter(Phase.OPTIMIZER)
    clock.updated()
    model.eval()
    assert model(points).isfinite().all()
    assert fired(plan) == []
    model.train()
    assert model(points).isnan().all()
    assert fired(plan) == [2]
    assert model(points).isfinite().all()


def test_a_nan_in_what_a_model_names(tmp_path: Path) -> None:
    """A model whose first parameters are its own may return a mapping."""

    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(()))

        def forward(self, points: torch.Tensor) -> dict[str, Any]:
            return {"logits": points * self.scale, "cache": None}

    model, plan = Named(), tmp_path / "plan.json"
    planted(plan, Fault("nan", 0, 1, "forward"), model).enter(Phase.FORWARD)
    assert model(torch.ones(2))["logits"].isnan().all()
    assert fired(plan) == [1]


class Lists(nn.Module):
    """Uses parameters of modules that are never called."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(4, 4)
        self.weights = nn.ParameterList([torch.ones(4, 4)])

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return points @ self.weights[0]


class Recurrent(nn.Module):
    """Its last layer returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(4, 4)

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layer(points)[0]
        return hidden


def training_update(model: nn.Module, points: torch.Tensor) -> None:
    model(points).sum().backward()


@pytest.mark.parametrize("model", [Lists, Recurrent, small.Net])
def test_faults_find_a_layer_in_any_model(tmp_path: Path, model: type[nn.Module]) -> None:
    points = torch.arange(12.0).view(3, 4)
    for kind, phase in (("nan", "forward"), ("oom", "forward"), ("oom", "backward")):
        plan, made = tmp_path / f"{kind}-{phase}.json", model()
        planted(plan, Fault(kind, 0, 1, phase), made).enter(Phase.FORWARD)
        with suppress(torch.OutOfMemoryError):
            training_update(made, points)
        assert fired(plan) == [1]


def test_samples_that_cannot_be_read_are_noted_by_their_read(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    clock = planted(plan, Fault("sample", 0, 2, "data"), small.Net())
    try:
        for _ in range(3):
            clock.enter(Phase.DATA)
            clock.updated()
        unreadable = unreadable_samples()
        assert unreadable is not None
        assert (unreadable.first, unreadable.end) == (8, 16)
        assert fired(plan) == []
        assert [unreadable.fails(), unreadable.fails()] == [True, False]
        assert fired(plan) == [2]
    finally:
        plant_unreadable(None)


@pytest.mark.parametrize(("kind", "phase"), [("nan", "forward"), ("sample", "data")])
def test_faults_that_come_with_a_read_or_a_forward_are_drawn_there(tmp_path: Path, kind: str, phase: str) -> None:
    """Later in the last update there is none."""
    draws = random.Random(0)
    drawn = [draw_fault(draws, kind, 2, 3, tmp_path / "plan.json") for _ in range(20)]
    assert {fault.phase for fault in drawn} == {phase}
    assert {fault.step for fault in drawn} == {2, 3}


def checkpoint(folder: Path, step: int, *sizes: int) -> None:
    place = folder / f"step-{step:08}"
    place.mkdir(parents=True)
    for rank, size in enumerate(sizes):
        (place / f"rank-{rank:05}.safetensors").write_bytes(bytes(size))


def test_a_byte_flips_in_a_file_that_is_read(tmp_path: Path) -> None:
    """Under ddp the last rank's file may have no tensors."""
    checkpoint(tmp_path, 2, 900, 64)
    assert newest_of_two(tmp_path) is None
    checkpoint(tmp_path, 4, 900, 64)
    assert newest_of_two(tmp_path) == tmp_path / "step-00000004" / "rank-00000.safetensors"


def test_a_flip_kills_all_ranks(tmp_path: Path) -> None:
    """One that is left would save a newer checkpoint, and the changed one would not be read."""
    checkpoints, plan = tmp_path / "checkpoints", tmp_path / "plan.json"
    for step in (2, 4):
        checkpoint(checkpoints, step, 64)
    program = f"""if True:
        from pathlib import Path
        from test_effects import *
        planted(Path({str(plan)!r}), Fault("flip", 0, 1, "forward", folder={str(checkpoints)!r})).enter(Phase.FORWARD)
    """
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        (tmp_path / "plan.process-1").write_text(str(other.pid))
        path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        flipping = subprocess.run([sys.executable, "-c", program], env={**os.environ, "PYTHONPATH": path}, check=False)
        assert flipping.returncode == -signal.SIGKILL
        assert other.wait(10) == -signal.SIGKILL
    assert fired(plan) == [1]
    assert any((checkpoints / "step-00000004" / "rank-00000.safetensors").read_bytes())


def run_of(folder: Path, attempts: int = 1, event: dict[str, Any] | None = None, aside: str = "") -> Path:
    line = {"began": 1.0, "launched": 0.0, "step": 0, "seconds": 0.0, "hosts": [["a", 2]]}
    (folder / "checkpoints" / aside).mkdir(parents=True)
    (folder / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for _ in range(attempts)))
    (folder / "events.jsonl").write_text(json.dumps(event) + "\n" if event is not None else "")
    return folder


@pytest.mark.parametrize(
    ("kind", "effect"),
    [
        ("kill", {"attempts": 2}),
        ("hang", {"attempts": 2}),
        ("oom", {"attempts": 2}),
        ("diverge", {"attempts": 2}),
        ("nan", {"event": {"bad_numbers": "rolled back", "step": 2}}),
        ("flip", {"attempts": 2, "aside": "broken-step-00000004"}),
    ],
)
def test_a_run_shows_the_effect_of_a_fault(tmp_path: Path, kind: str, effect: dict[str, Any]) -> None:
    assert has_effect(kind, run_of(tmp_path / "disturbed", **effect))
    assert not has_effect(kind, run_of(tmp_path / "undisturbed"))
