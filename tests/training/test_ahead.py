"""What is prepared for ranks: by the launcher that forks them, and by themselves while they wait."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lockstep.config.loading import load
from lockstep.config.recipes import resolve_recipe
from lockstep.core import standby
from lockstep.core.files import write_if_changed
from lockstep.training import ahead, job
from lockstep.training.ahead import ready_ahead, session_with
from lockstep.training.components import Purpose
from lockstep.training.job import opened
from lockstep.training.session import Session, components_of
from lockstep.training.sources import open_sources, opened_ahead
from lockstep.training.user_objects import UserObjects

RECIPES = ("digits", "stdlib-lm", "stdlib-classify")
FORKS = f"""
from lockstep.config.loading import load
from lockstep.config.recipes import resolve_recipe
from lockstep.launch.forking import may_fork
from lockstep.launch.local import import_ahead
from lockstep.training.ahead import imports_ahead, prepared_ahead

for name in {RECIPES}:
    config = load([resolve_recipe(name).path]).config
    import_ahead(imports_ahead(config))
    with prepared_ahead(config, 2):
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
    answers = iter([forks, False])  # nothing else is prepared
    monkeypatch.setattr(ahead, "resolved", lambda name: fail)
    monkeypatch.setattr(ahead, "may_fork", lambda: next(answers))
    config = load([resolve_recipe("digits").path], ["parallel.strategy=deepspeed", "launch.device=cpu"]).config
    with ahead.prepared_ahead(config, 2):
        assert imported == ["cpu"] * forks


def test_data_that_was_opened_ahead_is_opened_once_and_is_the_same() -> None:
    config = load([resolve_recipe("stdlib-lm").path], ["data.train.samples=100"]).config
    expected, _ = open_sources(config, UserObjects())
    with opened_ahead(config) as source:
        opened, _ = open_sources(config, UserObjects())
        assert opened is source
    again, _ = open_sources(config, UserObjects())
    assert again is not opened
    assert opened.fingerprint == expected.fingerprint
    indices = np.array([0, 3, 1])
    assert torch.equal(opened.fetch(indices).targets, expected.fetch(indices).targets)


@pytest.mark.parametrize("before", [None, "other", "text"])
def test_a_file_is_written_only_if_it_changes(tmp_path: Path, before: str | None) -> None:
    file = tmp_path / "file"
    if before is not None:
        file.write_text(before)
    inode = file.stat().st_ino if before is not None else None
    write_if_changed(file, "text")
    assert file.read_text() == "text"
    assert (file.stat().st_ino == inode) is (before == "text")


# --- ranks that wait ----------------------------------------------------------------------------------------------

CPU = ("launch.device=cpu", "batch.global_size=8")


@pytest.fixture
def waits() -> Iterator[None]:
    """Make this process a rank that waits, at a gate that is open by the time it gets there."""
    standby.wait_at(os.eventfd(1))
    yield
    standby.wait()  # unless the test has


def trained(session: Session) -> list[float]:
    return [session_report.loss for session_report, _ in zip(session, range(2), strict=False)]


@pytest.mark.usefixtures("waits")
def test_a_rank_that_waits_has_its_components_when_it_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load([resolve_recipe("digits").path], CPU).config
    with monkeypatch.context() as patched:
        patched.setattr(ahead, "assemble", lambda *arguments: pytest.fail("it has assembled twice"))
        with opened(config, UserObjects(), Purpose.RESUME) as session:
            components_of(session).draw()
            losses = trained(session)
    with opened(config, UserObjects()) as session:
        assert trained(session) == losses


@pytest.mark.usefixtures("waits")
def test_a_rank_that_is_needed_for_something_else_assembles_that() -> None:
    config = load([resolve_recipe("digits").path], CPU).config
    made = []

    def other(ready: Any, config: Any, given: Any, world: Any, *_: Any) -> Session:
        made.append(ready.components)
        return session_with(ready, config, given, world, Purpose.TRAIN)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(job, "session_with", other)
        with opened(config, UserObjects(), Purpose.RESUME) as session:
            assert components_of(session) is not made[0]
            components_of(session).draw()
            losses = trained(session)
    with opened(config, UserObjects()) as session:
        assert trained(session) == losses


@pytest.mark.usefixtures("waits")
@pytest.mark.parametrize(
    ("overrides", "objects"),
    [
        (("model.width=2048", "model.layers=4"), {}),
        (("model.compile=true",), {}),
        (("parallel.strategy=deepspeed",), {}),
        (("optim.name=custom", "optim.target=torch.optim:SGD"), {}),
        ((), {"schedule": lambda step, steps: 1.0}),
    ],
    ids=["large", "compiled", "with an engine of its own", "an optimizer", "a schedule"],
)
def test_a_rank_that_waits_takes_little_memory_and_runs_no_one_elses_code(
    overrides: tuple[str, ...], objects: dict[str, Any]
) -> None:
    config = load([resolve_recipe("digits").path], [*CPU, *overrides]).config
    assert ready_ahead(config, UserObjects(**objects), None) is None  # type: ignore[arg-type]
