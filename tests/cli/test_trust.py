"""Somebody else's run: its code runs only for who says so, and its keys are named."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.commands import run_lockstep

from lockstep.checkpoint.local import LocalStorage
from lockstep.cli.main import main
from lockstep.config.foreign_code import code_named_by
from lockstep.config.loading import validate
from lockstep.core.arguments import EvaluateArguments, ExportArguments, GenerateArguments

FOREIGN = """
from pathlib import Path
Path(__file__).with_name("executed").touch()

import torch
from torch import nn

class Net(nn.Linear):
    def __init__(self):
        super().__init__(4, 3)

class Loss:
    def count(self, batch):
        return batch.samples
    def loss_sum(self, outputs, batch):
        return nn.functional.cross_entropy(outputs.float(), batch.targets, reduction="sum")

def points():
    return torch.utils.data.TensorDataset(torch.eye(4), torch.tensor([0, 1, 2, 0]))

def collate(items):
    return torch.utils.data.default_collate(items)
"""


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of a file's model, objective and data."""
    folder = tmp_path_factory.mktemp("foreign")
    file = folder / "foreign.py"
    file.write_text(FOREIGN)
    data = {"kind": "custom", "target": f"{file}:points", "collate": f"{file}:collate"}
    config = {
        "model": {"kind": "custom", "target": f"{file}:Net"},
        "objective": {"kind": "custom", "target": f"{file}:Loss"},
        "data": {"train": data, "evaluation": {"same": data}},
        "batch": {"global_size": 4},
        "launch": {"device": "cpu"},
        "monitor": {"tensorboard": False, "progress": "none"},
        "run": {"steps": 2, "folder": str(folder / "run")},
    }
    (folder / "config.json").write_text(json.dumps(config))
    done = run_lockstep("train", folder / "config.json")
    assert done.returncode == 0, done.stderr
    return folder / "run"


@pytest.fixture
def run(finished: Path) -> Path:
    """The mark that the file's code leaves is gone."""
    (finished.parent / "executed").unlink(missing_ok=True)
    return finished


VERBS = {"eval": ("eval",), "generate": ("generate", "def "), "export": ("export", "--format", "hf")}


@pytest.mark.parametrize("verb", VERBS)
def test_code_of_a_run_is_named_and_does_not_run(run: Path, verb: str) -> None:
    name, *words = VERBS[verb]
    done = run_lockstep(name, run, *words)
    file = run.parent / "foreign.py"
    assert done.returncode == 2
    assert done.stderr == (
        "lockstep: the config of this run names code, which would run here:\n"
        f"  model.target: {file}:Net\n"
        f"  objective.target: {file}:Loss\n"
        f"  data.train.target: {file}:points\n"
        f"  data.train.collate: {file}:collate\n"
        f"  data.evaluation.same.target: {file}:points\n"
        f"  data.evaluation.same.collate: {file}:collate\n"
        "--trust-run lets it, if you trust whoever made the run\n"
    )
    assert not (run.parent / "executed").exists()


def test_trusted_it_runs(run: Path) -> None:
    done = run_lockstep("eval", run, "--trust-run")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("same: loss ")
    assert (run.parent / "executed").exists()


def test_tensors_are_exported_without_trust(run: Path, tmp_path: Path) -> None:
    assert main(["export", str(run), "--to", str(tmp_path / "model.pt")]) == 0
    assert torch.load(tmp_path / "model.pt", weights_only=True).keys() == {"weight", "bias"}
    assert not (run.parent / "executed").exists()
    assert len(LocalStorage(run / "checkpoints").names()) == 1


def test_a_model_of_ones_own_is_no_folder_for_transformers(run: Path) -> None:
    done = run_lockstep("export", run, "--format", "hf", "--trust-run")
    assert done.returncode == 2
    assert "--format hf is for models of the transformers library, and this is a Net" in done.stderr
    assert not (run / "export").exists()


# --- what names code ----------------------------------------------------------------------------------------------


def _named(**sections: Any) -> tuple[str, ...]:
    config = {
        "model": {"kind": "image-classifier"},
        "data": {"train": {"kind": "digits"}},
        "run": {"steps": 1},
    }
    return code_named_by(validate({**config, **sections}).config)


def test_what_names_code() -> None:
    custom = {"kind": "custom", "target": "a:B"}
    assert _named() == ()
    assert _named(model=custom) == ("model.target: a:B",)
    assert _named(objective=custom) == ("objective.target: a:B",)
    assert _named(data={"train": custom}) == ("data.train.target: a:B",)
    collated = {**custom, "collate": "c.py:D"}
    assert _named(data={"train": {"kind": "digits"}, "evaluation": {"x": collated}}) == (
        "data.evaluation.x.target: a:B",
        "data.evaluation.x.collate: c.py:D",
    )


def test_variables_that_can_run_code() -> None:
    """A loader's or a compiler's name in the environment is code too."""
    [named] = _named(launch={"environment": {"OMP_NUM_THREADS": "2", "LD_PRELOAD": "evil.so"}})
    assert named == "launch.environment.LD_PRELOAD: evil.so (a variable can make a process run code)"


def test_names_cannot_write_on_the_terminal() -> None:
    [named] = _named(model={"kind": "custom", "target": "a:B\x1b[2J"})
    assert named == r"model.target: 'a:B\x1b[2J'"


def test_the_flag_is_handed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    room = SimpleNamespace(evaluate=lambda *given: calls.append(given), generate=lambda *given: calls.append(given))
    monkeypatch.setitem(sys.modules, "lockstep.training.command", room)
    for words in (["eval", "r", "--trust-run"], ["generate", "r", "p", "--trust-run"]):
        with pytest.raises(AssertionError):  # the stand-in gives no exit code
            main(words)
    assert calls == [
        (Path("r"), EvaluateArguments(trust_run=True)),
        (Path("r"), "p", GenerateArguments(trust_run=True)),
    ]
    assert ExportArguments().trust_run is False
