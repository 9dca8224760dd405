"""With --json, stdout holds only the JSON document, whatever any process prints."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from kit.commands import Done, run_lockstep

from lockstep.cli.main import main
from lockstep.core.json_output import emit, json_only

NOISY = """
import os
import sys
from torch import nn

class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10)
    def forward(self, images):
        print("printed in a forward")
        os.write(1, b"written as C++ would\\n")
        return self.layer(images.flatten(1))
"""
CONFIG = {
    "model": {"kind": "custom", "target": "noisy.py:Noisy"},
    "objective": {"kind": "classification"},
    "data": {"train": {"kind": "digits"}, "evaluation": {"held-out": {"kind": "digits", "split": "held-out"}}},
    "run": {"steps": 2, "folder": "run"},
    "monitor": {"tensorboard": False},
    "launch": {"device": "cpu"},
    "profile": {"steps": "2..2"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a run of a model that prints."""
    place = tmp_path_factory.mktemp("json")
    (place / "noisy.py").write_text(NOISY)
    (place / "noisy.yaml").write_text(yaml.safe_dump(CONFIG))
    done = run_lockstep("train", "noisy.yaml", "--ranks", 2, "--json", cwd=place)
    _is_alone(done)
    assert json.loads(done.stdout)["steps"] == 2
    assert "step 2/2" in done.stderr
    shutil.copytree(place / "run", place / "copy")
    return place


def _is_alone(done: Done) -> None:
    assert done.returncode == 0, done.stderr
    json.loads(done.stdout)
    assert "written as C++ would" not in done.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("eval", "run", "--ranks", 2, "--trust-run"),
        ("report", "run"),
        ("compare", "run", "copy"),
        ("explain", "run"),
        ("ls", "."),
        ("profile", "run", "--show"),
        ("export", "run", "--to", "model.pt", "--trust-run"),
        ("verify", "noisy.yaml", "--strategies", "ddp", "--ranks", 2, "--steps", 1),
        ("plan", "noisy.yaml", "--measure", "--ranks", 1, "--peak", "none"),
        ("profile", "data", "noisy.yaml", "--ranks", 1, "--seconds", 1),
        ("profile", "memory", "noisy.yaml", "--ranks", 1),
        ("plan", "noisy.yaml", "--peak", "planned"),
        ("config", "show", "noisy.yaml"),
        ("ckpt", "ls", "run"),
        ("ckpt", "verify", "run"),
        ("ckpt", "audit", "run"),
    ],
    ids=lambda words: " ".join(map(str, words[:2])),
)
def test_stdout_is_json_alone(folder: Path, words: tuple[object, ...]) -> None:
    _is_alone(run_lockstep(*words, "--json", cwd=folder))


def test_a_finished_run_is_reported_on_stderr(folder: Path) -> None:
    done = run_lockstep("train", "noisy.yaml", "--json", cwd=folder)
    _is_alone(done)
    assert "is finished" in done.stderr


def test_a_failure_prints_nothing_on_stdout(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "show", "no-such-recipe", "--json"]) == 2
    result = capfd.readouterr()
    assert result.out == ""
    assert "no-such-recipe" in result.err


def test_numbers_that_are_not_finite_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    with json_only(True):
        print("progress")
        emit({"loss": float("nan"), "rows": [{"gap": float("inf")}], "steps": 3})
    result = capsys.readouterr()
    assert json.loads(result.out) == {"loss": None, "rows": [{"gap": None}], "steps": 3}
    assert result.err == "progress\n"
