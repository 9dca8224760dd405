"""A model that fails, or can't be simulated: the user's own line is named, and the exit code differs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lockstep.cli.main import main
from lockstep.core.errors import RunFailed
from lockstep.simulation import planning

MODELS = Path(__file__).with_name("failing_models.py")
ANSWERS = {
    "WrongShapes": (1, r"the run fails at failing_models.py:14 \(WrongShapes.forward\): a and b must have same"),
    "OnTheHost": (
        1,
        r"the run fails on an accelerator at failing_models.py:24 \(OnTheHost.forward\): .* the accelerator and cpu",
    ),
    "ByValues": (
        0,
        r"can't be simulated: what aten.nonzero.default returns at failing_models.py:30 \(ByValues.forward\)",
    ),
}


def arguments(model: str) -> list[str]:
    return [
        "--model.kind", "custom", "--model.target", f"{MODELS}:{model}", "--objective.kind", "classification",
        "--data.train.kind", "custom", "--data.train.target", f"{MODELS}:data", "--batch.global_size", "256",
        "--optim.lr", "0.1", "--run.steps", "3", "--parallel.strategy", "ddp", "--ranks", "2",
    ]  # fmt: skip


@pytest.mark.parametrize("model", ANSWERS)
def test_the_users_line_is_named(model: str, capfd: pytest.CaptureFixture[str]) -> None:
    code, message = ANSWERS[model]
    assert main(["plan", *arguments(model), "--peak", "planned", "--memory", "1GiB"]) == code
    printed = capfd.readouterr()
    assert re.search(message, printed.out + printed.err), printed
    assert "Traceback" not in printed.err


@pytest.mark.drill
def test_what_does_not_fit_here_is_not_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planning, "memory_here", lambda config, ranks: 1000)
    assert main(["plan", *arguments("Fits"), "--peak", "none", "--measure"]) == RunFailed.exit_code
    assert re.search(r"a rank would take .* KiB, and has 1000 B here; measure fewer ranks", capsys.readouterr().err)
