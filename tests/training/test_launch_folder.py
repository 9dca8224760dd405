"""The folder of a run that an elastic launcher restarts: the same after a restart, and another for another run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit import small
from kit.failures import fails

from lockstep.checkpoint.local import LocalStorage
from lockstep.config.schema import Config
from lockstep.config.writing import plain_yaml, to_public
from lockstep.core.errors import ConfigError
from lockstep.distributed.collectives import LocalGroup
from lockstep.distributed.process_group import World
from lockstep.monitor.folder import CONFIG, RunFolder
from lockstep.resuming.ownership import BEGUN, folder_of_launch, keep, resumed
from lockstep.resuming.resuming import Resume
from lockstep.training.job import Job, _run_folder

RANK = {"RANK": "0", "WORLD_SIZE": "1"}


def _config(**run: Any) -> Config:
    return Config.model_validate(small.config(run={"steps": 8, **run}))


def _world(store: dist.Store | None) -> World:
    return World(LocalGroup(), 0, 1, 0, 1, torch.device("cpu"), "none", launcher_store=store)


def _folder(store: dist.Store | None, config: Config | None = None) -> str:
    """The folder that the first rank of an attempt takes."""
    with _run_folder(Job(config or _config(), "recipes/toy.yaml"), _world(store)) as folder:
        return folder.name


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("launch", ["none", "4711"])
def test_a_restart_finds_the_folder(launch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, each attempt made a folder of its own, and trained from nothing."""
    for name, value in {**RANK, "TORCHELASTIC_RUN_ID": launch}.items():
        monkeypatch.setenv(name, value)
    store = dist.HashStore()
    first = _folder(store)
    assert _folder(store) == first
    assert (_folder(dist.HashStore()) == first) == (launch == "4711"), "another launch"


def test_a_job_that_is_queued_again_finds_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**RANK, "TORCHELASTIC_RUN_ID": "4711"}.items():
        monkeypatch.setenv(name, value)
    assert [_folder(dist.HashStore()), _folder(dist.HashStore()), _folder(None)] == ["toy-4711"] * 3


UUID = {**RANK, "TORCHELASTIC_RUN_ID": "7c0d046e-f6a7-465d-be2b-3bed5ac9d01d"}


def test_an_id_that_torchrun_makes_up_counts_where_its_store_is_not_used() -> None:
    folder = folder_of_launch(_config(), "toy", UUID)
    assert folder is not None
    assert folder.name == f"toy-{UUID['TORCHELASTIC_RUN_ID']}"


@pytest.mark.parametrize(
    "environ",
    [{}, RANK, {**RANK, "TORCHELASTIC_RUN_ID": "none"}, {**UUID, "TORCHELASTIC_USE_AGENT_STORE": "True"}],
)
def test_what_different_launches_share_is_no_id(environ: dict[str, str]) -> None:
    assert folder_of_launch(_config(), "toy", environ) is None


def test_a_run_that_starts_over_does_so_once() -> None:
    """Before, --fresh started over at each restart."""
    world, fresh = _world(dist.HashStore()), Resume(fresh=True, accept_changes=True)
    fork = Resume(origin=LocalStorage(Path("other")))
    assert resumed(fresh, world) == fresh
    keep(world, BEGUN)
    assert resumed(fresh, world) == Resume(accept_changes=True)
    assert resumed(fork, world) == Resume()
    assert resumed(fork, _world(None)) == fork


@pytest.mark.parametrize("resume", [Resume(fresh=True), Resume(step=4), Resume(origin=LocalStorage(Path("other")))])
def test_a_run_does_not_start_over_where_a_restart_looks_like_a_start(
    resume: Resume, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(ConfigError, match="would start over at each restart"):
        resumed(resume, _world(None))
    assert resumed(Resume(), _world(None)) == Resume()


def test_a_restart_of_a_fork_finds_the_folder_that_the_fork_has_made() -> None:
    """Before, rank 0 of a restart refused its own folder: `--fork begins a new run, and fork holds a run already`."""
    job = Job(_config(folder="fork"), "toy", resume=Resume(origin=LocalStorage(Path("other"))))
    store = dist.HashStore()
    with _run_folder(job, _world(store)) as folder:
        RunFolder(folder).write(CONFIG, plain_yaml(to_public(job.config)))
    with _run_folder(job, _world(store)) as again:
        assert again == folder
    refused = fails(ConfigError, "--fork", Path("fork").absolute())
    with refused, _run_folder(job, _world(dist.HashStore())):
        pass
