"""The folder of a run that an elastic launcher restarts: the same after a restart, and another for another run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit import small
from kit.worlds import in_world

from lockstep.checkpoint.local import LocalStorage
from lockstep.config.schema import Config, Launch
from lockstep.config.writing import plain_yaml, to_public
from lockstep.core.errors import ConfigError
from lockstep.distributed.collectives import LocalGroup
from lockstep.distributed.process_group import World, joined
from lockstep.monitor.folder import RunFolder
from lockstep.training import launch_record
from lockstep.training.job import Job, _run_folder
from lockstep.training.launch_folder import folder_of_launch, mark_begun, resumed
from lockstep.training.resuming import Resume

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
    (Path("runs") / first / "summary.json").write_text("{}")  # finished, and a rank failed after that
    assert _folder(store) == first
    assert _folder(dist.HashStore()) != first, "another launch"


def test_a_job_that_is_queued_again_finds_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**RANK, "TORCHELASTIC_RUN_ID": "4711"}.items():
        monkeypatch.setenv(name, value)
    assert [_folder(dist.HashStore()), _folder(dist.HashStore()), _folder(None)] == ["toy-4711"] * 3
    RunFolder(Path("runs/toy-4711").absolute()).write_config(plain_yaml(to_public(_config())))
    assert _folder(None) == "toy-4711"
    assert _folder(None, _config(seed=2)) == "toy-4711-2", "another run"


def test_ids_make_file_names_that_differ() -> None:
    names = [
        folder_of_launch(_config(), "toy", {**RANK, "TORCHELASTIC_RUN_ID": launch}) for launch in ("a/b", "a-b", "a b")
    ]
    assert len({folder.name for folder in names if folder is not None}) == 3
    assert {folder.parent.name for folder in names if folder is not None} == {"runs"}


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
    world, folder, fresh = _world(dist.HashStore()), Path("run"), Resume(fresh=True, accept_changes=True)
    fork = Resume(origin=LocalStorage(Path("other")))
    assert resumed(fresh, world, folder) == fresh
    mark_begun(world, folder)
    assert resumed(fresh, world, folder) == Resume(accept_changes=True)
    assert resumed(fork, world, folder) == Resume()
    assert resumed(fork, _world(None), folder) == fork


class _Host:
    """A host of a launch without a store: its ranks are `process`'s."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, process: int, launch: str = "none") -> None:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", launch)
        monkeypatch.setattr(launch_record, "_launcher", lambda: ["machine", process, "1"])
        self.world = _world(None)

    def begins(self, folder: Path, resume: Resume) -> Resume:
        """Begin a run; return how."""
        with _run_folder(Job(_config(folder=str(folder)), "toy", resume=resume), self.world) as path:
            begun = resumed(resume, self.world, path)
            mark_begun(self.world, path)
        RunFolder(folder.absolute()).write_config(plain_yaml(to_public(_config())))
        return begun


@pytest.mark.parametrize(
    "resume",
    [Resume(fresh=True), Resume(step=4), Resume(origin=LocalStorage(Path("other")))],
    ids=["fresh", "step", "origin"],
)
def test_a_run_that_starts_over_does_so_once_without_a_store_too(
    resume: Resume, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, --fresh started over at each restart, and --fork refused its own folder."""
    folder = Path("run")
    assert _Host(monkeypatch, 7).begins(folder, resume) == resume
    assert _Host(monkeypatch, 7).begins(folder, resume) == Resume(), "restarted"
    if resume.origin is None:
        assert _Host(monkeypatch, 8).begins(folder, resume) == resume, "another launch"
        assert _Host(monkeypatch, 8, "4711").begins(folder, resume) == resume, "another launch of the same process"


def test_ranks_that_failed_before_the_run_began_start_over_again(monkeypatch: pytest.MonkeyPatch) -> None:
    fork, host = Resume(origin=LocalStorage(Path("other"))), _Host(monkeypatch, 7)
    with _run_folder(Job(_config(folder="run"), "toy", resume=fork), host.world):
        pass
    assert host.begins(Path("run"), fork) == fork


def _begins_on_hosts(folder: str, hosts: list[int]) -> bool:
    """Whether a launch that starts over does so; a host for each rank."""
    os.environ["TORCHELASTIC_RUN_ID"] = "none"
    launch_record._launcher = lambda: [f"host {hosts[world.rank]}", 7, "1"]
    with joined(Launch(device="cpu"), grouped=True) as world:
        begun = resumed(Resume(fresh=True), world, Path(folder))
        mark_begun(world, Path(folder))
    return begun.fresh


def test_a_launch_is_the_same_as_long_as_one_host_stays(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    assert in_world(2, _begins_on_hosts, str(tmp_path), [0, 1]) == [True, True]
    assert in_world(2, _begins_on_hosts, str(tmp_path), [2, 1]) == [False, False], "rank 0 is on a host that has joined"
    assert in_world(1, _begins_on_hosts, str(tmp_path), [2]) == [False]
    assert in_world(2, _begins_on_hosts, str(tmp_path), [0, 1]) == [True, True], "none of those is among these"


def test_a_script_between_the_launcher_and_its_rank_is_no_launcher() -> None:
    ask = "from lockstep.training.launch_record import _launcher; print(_launcher()[1])"
    script = f"{sys.executable} -c '{ask}'; exit $?"
    environ = {**os.environ, "TORCHELASTIC_RUN_ID": "none"}
    shown = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, text=True, check=True)
    assert int(shown.stdout) == os.getpid()


def test_a_restart_of_a_fork_finds_the_folder_that_the_fork_has_made() -> None:
    """Before, rank 0 of a restart refused its own folder: `--fork begins a new run, and fork holds a run already`."""
    job = Job(_config(folder="fork"), "toy", resume=Resume(origin=LocalStorage(Path("other"))))
    store = dist.HashStore()
    with _run_folder(job, _world(store)) as folder:
        RunFolder(folder).write_config(plain_yaml(to_public(job.config)))
    with _run_folder(job, _world(store)) as again:
        assert again == folder
    refused = pytest.raises(ConfigError, match=r"--fork begins a new run, and .*fork holds a run already")
    with refused, _run_folder(job, _world(dist.HashStore())):
        pass
