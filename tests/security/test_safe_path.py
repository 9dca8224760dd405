"""Lockstep started in an untrusted folder imports none of its modules."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# `python -m` itself imports importlib and lockstep before Lockstep's code runs: there is no row for these two.
NAMES = (
    "__future__", "typing", "argparse", "yaml", "pydantic", "torch", "numpy", "multiprocessing", "pickle",
    "socket", "signal", "selectors", "transformers", "rich", "tensorboard", "deepspeed", "safetensors", "xxhash",
)  # fmt: skip
MARK = 'from posix import open as o; o("imported", 577)\nraise ImportError("a module of the working folder")\n'


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    folder = tmp_path / "untrusted folder"
    folder.mkdir()
    for name in NAMES:
        (folder / f"{name}.py").write_text(MARK)
    return folder


def _python(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    return subprocess.run([sys.executable, *words], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    "words",
    [
        ("-m", "lockstep", "version"),
        ("-u", "-m", "lockstep", "config", "check"),
        ("-mlockstep", "plan", "digits", "--ranks", "2", "--peak", "none"),
    ],
    ids=" ".join,
)
def test_the_command_imports_nothing_from_the_working_folder(hostile: Path, words: tuple[str, ...]) -> None:
    done = _python(hostile, *words)
    assert done.returncode == 0, done.stderr
    assert not (hostile / "imported").exists()


SCRIPT = """
import os, sys, threading
sys.path[:] = [path for path in sys.path if path not in ("", os.getcwd())]
from lockstep.config.schema import Launch
from lockstep.launch.local import launch

def entry():
    os.write(1, f"{'PYTHONSAFEPATH' in os.environ} {os.getcwd() in sys.path}\\n".encode())  # in one piece
    return 0

if __name__ == "__main__":
    threading.Thread(target=threading.Event().wait, daemon=True).start()  # so that ranks are spawned
    sys.exit(launch(entry, 2, Launch(device="cpu"), None).show())
"""


def test_ranks_that_are_spawned_import_nothing_from_it_either(hostile: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = _python(hostile, str(tmp_path / "script.py"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["False"] * 4
    assert not (hostile / "imported").exists()


def test_modules_that_a_config_names_are_imported_from_it(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "import torch\n"
        "def points():\n"
        "    return torch.utils.data.TensorDataset(torch.eye(4), torch.tensor([0, 1, 2, 0]))\n"
    )
    words = ["model.kind=image-classifier", "data.train={kind: custom, target: 'mine:points'}", "data.evaluation={}"]
    done = _python(tmp_path, "-m", "lockstep", "plan", "digits", "--peak", "none", *words)
    assert "mine:points" not in done.stderr, done.stderr


def test_a_program_that_imports_lockstep_keeps_its_path(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import lockstep, neighbor\n")
    (tmp_path / "neighbor.py").write_text("print('imported')\n")
    assert _python(tmp_path, "-m", "program").stdout == "imported\n"
