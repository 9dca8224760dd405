"""`make install`: which build of PyTorch it takes, with and without an NVIDIA GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
PYTHON = """#!/bin/sh
[ "$1 $2" = "-m venv" ] || exit 0
mkdir -p .venv/bin && cp pip .venv/bin/python
"""
PIP = """#!/bin/sh
echo "$@" >> calls
case "$*" in *" torch") exit "$TORCH_EXIT" ;; esac
"""


def make(folder: Path, target: str, nvidia_smi: str, torch_exit: int = 0) -> subprocess.CompletedProcess[str]:
    """Run make in a copy, with stand-ins for Python, pip and nvidia-smi."""
    for name in ("Makefile", "constraints.txt", "constraints-cuda.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    (folder / "bin").mkdir()
    for name, text in (("python", PYTHON), ("pip", PIP), ("bin/nvidia-smi", f"#!/bin/sh\n{nvidia_smi}\n")):
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("MAKE", "MFLAGS", "PIP_"))}
    environment = {**kept, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "TORCH_EXIT": str(torch_exit)}
    command = ["make", "--silent", target, f"PYTHON={folder / 'python'}"]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def pins(name: str) -> Requirement:
    lines = (ROOT / name).read_text().splitlines()
    return next(Requirement(line) for line in lines if line.startswith("torch=="))


def test_constraints_are_met_by_the_cpu_build_only() -> None:
    assert "2.13.0+cpu" in pins("constraints.txt").specifier
    assert "2.13.0" not in pins("constraints.txt").specifier
    assert "2.11.0" in pins("constraints-cuda.txt").specifier


@pytest.mark.parametrize("nvidia_smi", ["exit 127", "echo 'NVIDIA-SMI has failed'; exit 9"])
def test_without_a_gpu_the_cpu_build_is_installed_before_what_needs_torch(tmp_path: Path, nvidia_smi: str) -> None:
    made = make(tmp_path, "install", nvidia_smi)
    assert made.returncode == 0, made.stderr
    first, second, *_ = (tmp_path / "calls").read_text().splitlines()
    assert first.endswith(" torch")
    assert {"--no-deps", "constraints.txt", "https://download.pytorch.org/whl/cpu"} < set(first.split())
    assert "--editable" in second
    assert "--extra-index-url" not in second


def test_where_no_cpu_build_is_found_nothing_else_is_fetched(tmp_path: Path) -> None:
    made = make(tmp_path, "install", "exit 127", torch_exit=1)
    assert made.returncode == 2
    assert "TORCH_INDEX" in made.stderr
    assert len((tmp_path / "calls").read_text().splitlines()) == 1
    assert not (tmp_path / ".venv" / ".installed").exists()


def test_with_gpus_the_default_build_is_installed(tmp_path: Path) -> None:
    made = make(tmp_path, "install", "echo 'GPU 0: one'; echo '  MIG 1g.5gb'; echo 'GPU 1: two'")
    assert made.returncode == 0, made.stderr
    calls = (tmp_path / "calls").read_text()
    assert "--constraint constraints-cuda.txt" in calls
    assert "--extra-index-url" not in calls
