"""What the launcher prepares for the ranks that it forks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lockstep.config.loading import load
from lockstep.config.recipes import resolve_recipe
from lockstep.core.files import write_if_changed
from lockstep.training import ahead

RECIPES = ("digits", "stdlib-lm", "stdlib-classify")
FORKS = f"""
from lockstep.config.loading import load
from lockstep.config.recipes import resolve_recipe
from lockstep.core.processes import may_fork
from lockstep.launch.local import import_ahead
from lockstep.training.ahead import import_on_cpu, imports_ahead

for name in {RECIPES}:
    config = load([resolve_recipe(name).path]).config
    import_ahead(imports_ahead(config))
    import_on_cpu(config)
    assert may_fork(), name
"""


def test_a_launcher_that_has_prepared_may_fork() -> None:
    done = subprocess.run([sys.executable, "-c", FORKS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("forks", [True, False])
def test_a_strategy_is_imported_where_ranks_are_forked_and_its_failure_is_theirs(
    monkeypatch: pytest.MonkeyPatch, forks: bool
) -> None:
    def fail(device: torch.device) -> None:
        imported.append(device.type)
        raise RuntimeError("another version of a library")

    imported: list[str] = []
    monkeypatch.setattr(ahead, "resolved", lambda name: fail)
    monkeypatch.setattr(ahead, "may_fork", lambda: forks)
    config = load([resolve_recipe("digits").path], ["parallel.strategy=deepspeed", "launch.device=cpu"]).config
    ahead.import_on_cpu(config)
    assert imported == ["cpu"] * forks


@pytest.mark.parametrize("before", [None, "other", "text"])
def test_a_file_is_written_only_if_it_changes(tmp_path: Path, before: str | None) -> None:
    file = tmp_path / "file"
    if before is not None:
        file.write_text(before)
    inode = file.stat().st_ino if before is not None else None
    write_if_changed(file, "text")
    assert file.read_text() == "text"
    assert (file.stat().st_ino == inode) is (before == "text")
