"""A folder of checkpoints belongs to one run: another run that is pointed at it is refused, and a checkpoint that was
copied in is not used. The run itself can be moved, copied, forked and started again."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from kit import small
from kit.commands import run_lockstep
from kit.failures import fails, gives
from kit.worlds import in_world

import lockstep
from lockstep.checkpoint.local import LocalStorage
from lockstep.checkpoint.reading import read_manifest
from lockstep.cli.main import main
from lockstep.config.known_runs import id_of_run
from lockstep.config.loading import validate
from lockstep.core.errors import ConfigError, RunFailed
from lockstep.core.extensions import instance
from lockstep.loop.session import Session, components_of
from lockstep.resuming.ownership import run_folder_for
from lockstep.resuming.resuming import Resume


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def _config(lr: float = 0.01, steps: int = 6, **sections: Any) -> dict[str, Any]:
    every = {"every": "2 steps", "keep_last": 9, "asynchronous": False, **sections.pop("checkpoint", {})}
    return small.config(optim={"lr": lr}, checkpoint=every, run={"steps": steps, **sections.pop("run", {})}, **sections)


def _file(name: str, **asked: Any) -> str:
    config = _config(**asked)
    Path(name).write_text(yaml.safe_dump({**config, "launch": {"device": "cpu", "ranks": 1}}))
    return name


_SHARED = {"checkpoint": {"folder": "./checkpoints"}}


def _steps(folder: str | Path) -> list[str]:
    return LocalStorage(Path(folder)).names()


# --- one folder, two runs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("second", ["another", "first"])
def test_a_second_run_is_refused_in_the_folder_of_a_first(second: str, capsys: pytest.CaptureFixture[str]) -> None:
    first = _file("first.yaml", **_SHARED)
    other = _file("another.yaml", lr=0.02, **_SHARED)
    assert main(["train", first]) == 0
    owner = next(Path("runs").iterdir()).absolute()
    before = sorted(Path("checkpoints").rglob("*"))
    capsys.readouterr()
    assert main(["train", other if second == "another" else first]) == 2
    said = capsys.readouterr().err
    assert gives(said, owner, "step 6", f"lockstep train {owner}")
    assert gives(said, f"checkpoint.folder: ./checkpoints/{second}")
    assert sorted(Path("checkpoints").rglob("*")) == before
    assert len(list(Path("runs").iterdir())) == 1
    assert main(["train", other, "--checkpoint.folder", f"./checkpoints/{second}"]) == 0  # what it advises works


def test_a_run_does_not_start_over_because_its_checkpoints_are_elsewhere(capsys: pytest.CaptureFixture[str]) -> None:
    lockstep.train(_config(run={"folder": "./run"}))
    words = ["train", "run", "--run.steps", "8", "--checkpoint.folder", "./other"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert gives(said, Path("run").absolute(), Path("run/checkpoints").absolute(), "step 6")
    assert len((Path("run") / "metrics.jsonl").read_text().splitlines()) > 0
    shutil.copytree("run/checkpoints", "other")
    assert main(words) == 0
    assert "resumes from step 6 " in capsys.readouterr().out
    assert _steps("other")[-1] == "step-00000008"


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_of_another_launcher_are_refused_together(ranks: int) -> None:
    lockstep.train(_config(**_SHARED), name="first")
    for said in in_world(ranks, _refused, _config(lr=0.02, **_SHARED)):
        assert gives(said, "checkpoint.folder", "first")


def _refused(config: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as raised:
        lockstep.train(config)
    return str(raised.value)


def test_the_same_command_resumes_a_run_that_was_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        _cut_short(patch, after=5)
        with pytest.raises(KeyboardInterrupt):
            lockstep.train(_config(**_SHARED))
    assert _steps("checkpoints") == ["step-00000002", "step-00000004", "step-00000005"]
    (run,) = Path("runs").iterdir()
    done = lockstep.train(_config(**_SHARED))
    assert done.folder == run.absolute()
    attempts = read_manifest(LocalStorage(Path("checkpoints")), "step-00000006").state["ledger"]
    assert [(one["first"], one["last"]) for one in attempts] == [(0, 53), (53, 66)]


def _cut_short(patch: pytest.MonkeyPatch, after: int) -> None:
    commit = Session.commit

    def cut(session: Session) -> Any:
        if session.progress.steps == after:
            components_of(session).world.axis.barrier()
            raise KeyboardInterrupt
        return commit(session)

    patch.setattr(Session, "commit", cut)


def test_a_run_cut_short_is_not_resumed_with_other_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        _cut_short(patch, after=5)
        with pytest.raises(KeyboardInterrupt):
            lockstep.train(_config(**_SHARED))
    with fails(ConfigError, "another run", key="checkpoint.folder"):
        lockstep.train(_config(lr=0.02, **_SHARED))


@pytest.mark.parametrize("name", ["stat", "listdir"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_file_system_that_is_gone_once_while_the_folder_is_checked_is_asked_again(
    name: str, number: int, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "saved").mkdir()
    function, left = getattr(os, name), [1]

    def fails_once(place: Any, *arguments: Any, **more: Any) -> Any:
        if left[0] and str(place).endswith("saved"):
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        return function(place, *arguments, **more)

    monkeypatch.setattr(os, name, fails_once)
    assert run_folder_for(validate(_config(checkpoint={"folder": "saved"})).config, "digits", Resume()) is None
    assert left == [0]


def test_a_folder_without_checkpoints_is_free() -> None:
    lockstep.train(_config(**_SHARED))
    for name in _steps("checkpoints"):
        shutil.rmtree(Path("checkpoints", name))
    assert lockstep.train(_config(lr=0.02, **_SHARED)).summary["steps"] == 6


def test_another_recipe_does_not_go_on_in_a_run_folder(capsys: pytest.CaptureFixture[str]) -> None:
    first = _file("first.yaml", run={"folder": "run"})
    other = _file("other.yaml", lr=0.02, run={"folder": "run"})
    assert main(["train", first]) == 0
    assert main(["train", other]) == 2
    said = capsys.readouterr().err
    assert gives(said, "run", "first")
    assert gives(said, "optim.lr", 0.01, 0.02)
    assert main(["train", other, "--run.steps", "9"]) == 2
    assert main(["train", first, "--optim.lr", "0.02"]) == 2  # would train nothing
    assert main(["train", first]) == 0  # there is nothing to do
    assert main(["train", "run", "--optim.lr", "0.02", "--run.steps", "8"]) == 0


# --- one object store, two runs -------------------------------------------------------------------------------------


STORE = """
import sqlite3


class Sqlite:
    def __init__(self, file: str) -> None:
        self._connection = sqlite3.connect(file, check_same_thread=False, isolation_level=None)
        self._connection.execute("CREATE TABLE IF NOT EXISTS objects (name TEXT PRIMARY KEY, data BLOB)")
        self.place = file

    def names(self, prefix):
        rows = self._connection.execute("SELECT name FROM objects").fetchall()
        return [name for (name,) in rows if name.startswith(prefix)]

    def size(self, name):
        return len(self._data(name))

    def read(self, name, offset, size):
        return self._data(name)[offset : offset + size]

    def write(self, name, data):
        self._connection.execute("INSERT OR REPLACE INTO objects VALUES (?, ?)", (name, bytes(data)))

    def delete(self, name):
        self._connection.execute("DELETE FROM objects WHERE name = ?", (name,))

    def _data(self, name):
        row = self._connection.execute("SELECT data FROM objects WHERE name = ?", (name,)).fetchone()
        if row is None:
            raise FileNotFoundError(name)
        return row[0]
"""


@pytest.fixture
def store() -> dict[str, Any]:
    """A section `checkpoint` that names a database as the storage."""
    Path("store.py").write_text(STORE)
    return {"checkpoint": {"storage": {"target": "store.py:Sqlite", "arguments": {"file": "ckpt.db"}}}}


def test_a_second_run_is_refused_in_the_storage_of_a_first(store: dict[str, Any]) -> None:
    first = _file("first.yaml", run={"folder": "runs/first"}, **store)
    other = _file("other.yaml", run={"folder": "runs/other"}, **store)
    assert main(["train", first]) == 0
    owner = Path("runs/first").absolute()
    for ranks in (1, 2):
        refused = run_lockstep("train", other, "--ranks", ranks)
        said = refused.stderr
        assert refused.returncode == 2, said
        assert gives(said, "checkpoint.storage", "ckpt.db", "first", owner, "step 6")
        assert f"lockstep train {owner}" in said
        assert not Path("runs/other").exists()
    assert main(["train", other, "--fresh"]) == 2  # it would move another run's checkpoints
    assert main(["train", first, "--run.steps", "8"]) == 0
    assert main(["train", other, "--checkpoint.storage.arguments.file", "other.db"]) == 0


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_of_another_launcher_are_refused_together_in_a_storage(store: dict[str, Any], ranks: int) -> None:
    lockstep.train(_config(**store), name="first")
    for said in in_world(ranks, _refused, _config(lr=0.02, **store)):
        assert gives(said, "checkpoint.storage", "ckpt.db", "first")


def test_the_same_command_resumes_from_the_storage_of_a_run_that_was_cut_short(
    store: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        _cut_short(patch, after=5)
        with pytest.raises(KeyboardInterrupt):
            lockstep.train(_config(**store))
    (run,) = Path("runs").iterdir()
    with fails(ConfigError, "another run", key="checkpoint.storage"):
        lockstep.train(_config(lr=0.02, **store))
    known = id_of_run(run)
    assert id_of_run(lockstep.train(_config(**store)).folder) == known


def test_a_storage_passed_in_python_belongs_to_one_run(store: dict[str, Any]) -> None:
    memory = instance_of_store()
    config = _config(run={"folder": "run"})
    lockstep.train(config, storage=memory)
    with fails(ConfigError, "another run", Path("run").absolute()):
        lockstep.train(_config(run={"folder": "other"}), storage=memory)
    assert lockstep.train({**config, "run": {"folder": "run", "steps": 8}}, storage=memory).summary["steps"] == 8


def test_a_session_continues_the_checkpoints_of_a_run_only_if_it_is_asked_to(store: dict[str, Any]) -> None:
    memory = instance_of_store()
    lockstep.train(_config(run={"folder": "run"}), storage=memory)
    other = _config(lr=0.03, steps=8)
    with lockstep.session(other) as session, pytest.raises(ConfigError, match=r"another run.*accept_changes=True"):
        session.checkpoints(memory)
    with lockstep.session(other) as session:
        assert session.checkpoints(memory, accept_changes=True).resumed_from == 6


def test_a_session_continues_the_checkpoints_of_a_run_with_the_same_settings_under_another_strategy(
    store: dict[str, Any],
) -> None:
    memory = instance_of_store()
    lockstep.train({**_config(run={"folder": "run"}), "parallel": {"strategy": "single"}}, storage=memory)
    with lockstep.session({**_config(steps=8), "parallel": {"strategy": "ddp"}}) as session:
        assert session.checkpoints(memory).resumed_from == 6


def test_a_run_does_not_take_the_checkpoints_of_a_session(store: dict[str, Any]) -> None:
    memory = instance_of_store()
    with lockstep.session(_config(lr=0.03)) as session:
        saves = session.checkpoints(memory)
        for report in session:
            if report.step == 3:
                break
        saves.save()
        saves.finish()
    with lockstep.session(_config(lr=0.03)) as session:
        assert session.checkpoints(memory).resumed_from == 3
    with pytest.raises(ConfigError, match=r"another run, session \(run id"):
        lockstep.train(_config(run={"folder": "run"}), storage=memory)


def instance_of_store() -> Any:
    return instance("storage", "store.py:Sqlite", {"file": "ckpt.db"}, lockstep.extend.ObjectStore, key="storage")


# --- moves, copies, forks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("sections", [{}, _SHARED], ids=["inside", "outside"])
def test_a_run_that_was_moved_resumes(sections: dict[str, Any]) -> None:
    lockstep.train(_config(run={"folder": "run"}, **sections))
    known = id_of_run(Path("run"))
    Path("run").rename("moved")
    assert main(["train", "moved", "--run.steps", "8"]) == 0
    assert json.loads(Path("moved/summary.json").read_text())["steps"] == 8
    place = "checkpoints" if sections else "moved/checkpoints"
    manifest = read_manifest(LocalStorage(Path(place)), "step-00000008")
    assert len(manifest.state["ledger"]) == 2
    assert manifest.run == known == id_of_run(Path("moved"))


def test_a_copy_resumes_where_its_checkpoints_were_copied_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    lockstep.train(_config(run={"folder": "run"}))
    shutil.copytree("run", "copy")
    assert main(["train", "copy", "--run.steps", "8"]) == 0
    assert main(["train", "run", "--run.steps", "7"]) == 0
    lockstep.train(_config(run={"folder": "outside"}, **_SHARED))
    shutil.copytree("outside", "second")
    assert main(["train", "second", "--run.steps", "8"]) == 2  # both would save to one place
    assert gives(capsys.readouterr().err, "another run", Path("outside").absolute())
    assert main(["train", "outside", "--fork", "fork", "--run.steps", "8"]) == 0
    assert id_of_run(Path("fork")) not in (None, id_of_run(Path("outside")))


# --- a checkpoint that was copied in ------------------------------------------------------------------------------


@pytest.fixture
def copied_in(here: Path) -> Path:
    """A run of 4 steps, and in its folder a checkpoint of step 6 of another one."""
    lockstep.train(_config(run={"folder": "run"}, steps=4))
    lockstep.train(_config(run={"folder": "other"}, lr=0.02))
    shutil.copytree("other/checkpoints/step-00000006", "run/checkpoints/step-00000006")
    return Path("run")


def test_a_checkpoint_of_another_run_is_not_used(copied_in: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = str(id_of_run(Path("other")))[:8]
    for words in (["verify"], ["audit"], ["show"], ["verify", "--all"]):
        assert main(["ckpt", words[0], str(copied_in), *words[1:]]) == 3, words
        assert gives(capsys.readouterr().err, "another run", f"id {other}")
    assert main(["ckpt", "ls", str(copied_in)]) == 0
    assert gives(capsys.readouterr().out, "another run", f"id {other}")
    assert main(["train", str(copied_in), "--run.steps", "8"]) == 0
    said = capsys.readouterr().out
    assert "resumes from step 4" in said
    assert gives(said, "step-00000006")
    assert (copied_in / "checkpoints/broken-step-00000006").is_dir()
    assert main(["ckpt", "verify", str(copied_in), "--all"]) == 0
    assert main(["ckpt", "audit", str(copied_in)]) == 0


def test_a_whole_folder_of_checkpoints_of_another_run_is_refused(copied_in: Path) -> None:
    shutil.rmtree("run/checkpoints")
    shutil.copytree("other/checkpoints", "run/checkpoints")
    with fails(RunFailed, "step-00000006", "another run"):
        lockstep.train(_config(run={"folder": "run"}, steps=8))
    assert main(["ckpt", "verify", "run"]) == 3
    assert main(["train", "run", "--run.steps", "8", "--fresh"]) == 0


def test_a_session_of_the_library_uses_no_checkpoint_of_another(copied_in: Path) -> None:
    shutil.rmtree("run")
    with lockstep.session(_config(lr=0.03)) as session:
        saves = session.checkpoints("run")
        for report in session:
            if report.step == 3:
                break
        saves.save()
        saves.finish()
    shutil.copytree("other/checkpoints/step-00000006", "run/step-00000006")
    with lockstep.session(_config(lr=0.03)) as session:
        assert session.checkpoints("run").resumed_from == 3
