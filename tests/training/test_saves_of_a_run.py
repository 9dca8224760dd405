"""What a whole run saves, where it lies, and what it refuses before it begins."""

from __future__ import annotations

import errno
import json
import os
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import small
from kit.failures import fails, gives
from kit.worlds import in_world
from safetensors.torch import load_file

from lockstep.checkpoint.local import LocalDraft, LocalStorage
from lockstep.checkpoint.reading import Reader, ReadItem, read_manifest, verify
from lockstep.checkpoint.storage import names_by_step
from lockstep.cli.main import main
from lockstep.config.loading import validate
from lockstep.core.errors import ConfigError, RunFailed
from lockstep.resuming.checkpoints import Checkpoints
from lockstep.resuming.resuming import Resume
from lockstep.training import job
from lockstep.training.job import Job, run_job


def _config(folder: Path, **sections: Any) -> dict[str, Any]:
    return small.config(**{"run": {"steps": 7, "folder": str(folder)}, **sections})


def _run(config: dict[str, Any]) -> None:
    run_job(Job(validate(config).config, "saves"))


def test_the_last_save_has_the_last_evaluation_whatever_else_is_due_there(tmp_path: Path) -> None:
    run = tmp_path / "run"
    checkpoint = {"every": "7 steps", "best": "held-out.loss"}
    _run(_config(run, checkpoint=checkpoint, evaluation={"every": "5 steps"}, run={"steps": 7, "folder": str(run)}))
    storage = LocalStorage(run / "checkpoints")
    assert set(read_manifest(storage, "step-00000007").metrics) == {"held-out.loss", "held-out.accuracy"}


def test_a_best_that_no_evaluation_has_is_refused(tmp_path: Path) -> None:
    with fails(ConfigError, "held-out.los", "held-out.loss?", key="checkpoint.best"):
        _run(_config(tmp_path / "run", checkpoint={"best": "held-out.los"}))


@pytest.mark.parametrize("key", ["run", "checkpoint"])
def test_a_file_is_no_folder(key: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    sections: dict[str, Any] = {"run": {"steps": 7, "folder": str(tmp_path / "run")}, "checkpoint": {}}
    sections[key]["folder"] = str(file)
    with fails(ConfigError, file, key=f"{key}.folder"):
        _run(_config(tmp_path, **sections))


def _with_a_full_disk(config: dict[str, Any]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalDraft, "write", _full)
        with pytest.raises(RunFailed) as raised:
            _run(config)
    return str(raised.value)


def _full(*_: object) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_that_can_not_be_saved_leaves_its_weights(ranks: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    weights = run / "model" / "model.safetensors"
    for said in in_world(ranks, _with_a_full_disk, _config(run)):
        assert gives(said, "step 7", os.strerror(errno.ENOSPC), weights)
    assert weights.is_file()
    assert not (run / "summary.json").exists()


class Endless(small.CrossEntropy):
    """Evaluates a model as the next of its figures."""

    def __init__(self, figures: list[str]) -> None:
        self._figures = [float(figure) for figure in figures]

    def metrics(self, loss_sum: float, count: float, sums: Mapping[str, float]) -> dict[str, float]:
        asked_for_names = loss_sum == count
        return {"loss": loss_sum / count, "figure": 1.0 if asked_for_names else self._figures.pop(0)}


def _judged(folder: Path, figures: list[str], **sections: Any) -> dict[str, Any]:
    target = {"kind": "custom", "target": f"{__name__}:Endless", "arguments": {"figures": figures}}
    return _config(folder, objective=target, **sections)


def test_a_metric_that_is_not_finite_costs_no_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    checkpoint = {"best": "held-out.figure", "best_is": "highest", "keep_last": 9, "every": "2 steps"}
    sections = {"checkpoint": checkpoint, "evaluation": {"every": "2 steps"}}
    config = _judged(run, ["inf", "0.5", "nan", "-inf"], **sections)
    in_world(1, _run, config)
    storage = LocalStorage(run / "checkpoints")
    saved = {one.step: one for one in (read_manifest(storage, name) for name in storage.names())}
    assert {step: saved[step].metrics["held-out.figure"] for step in saved} == {2: None, 4: 0.5, 6: None, 7: None}
    assert {step: saved[step].state["best"] for step in saved} == {2: None, 4: 0.5, 6: 0.5, 7: 0.5}
    assert (
        json.loads((run / "summary.json").read_text(), parse_constant=pytest.fail)["evaluation"]["held-out"]["figure"]
        is None
    )
    capsys.readouterr()
    assert main(["ckpt", "ls", str(run)]) == 0
    rows = {row.split()[0]: row for row in capsys.readouterr().out.splitlines()[2:]}
    assert [step for step in rows if "best" in rows[step]] == ["4"]
    assert sorted(step for step in rows if "figure not finite" in rows[step]) == ["2", "6", "7"]
    assert main(["ckpt", "show", str(run), "--step", "2"]) == 0
    in_world(1, _run, {**config, "run": {**config["run"], "steps": 9}})
    assert read_manifest(storage, "step-00000009").state["best"] == 0.5


def test_the_best_value_of_another_metric_is_not_that_of_this_one(tmp_path: Path) -> None:
    """The run resumes with another `checkpoint.best`, whose best checkpoint is saved as it is found."""
    checkpoint = {"every": None, "keep_last": 1, "best": "held-out.loss"}
    config = _judged(tmp_path / "run", ["5", "3", "4"], checkpoint=checkpoint, evaluation={"every": "2 steps"})
    in_world(1, _run, {**config, "run": {**config["run"], "steps": 2}})
    in_world(1, _run, {**config, "checkpoint": {**checkpoint, "best": "held-out.figure", "best_is": "lowest"}})
    assert 6 in names_by_step(LocalStorage(tmp_path / "run" / "checkpoints").names())


def _fork_twice(config: dict[str, Any], origin: Path) -> None:
    """The first time it ends as it begins, once its own first checkpoint exists; its launcher starts it again."""
    (folder := Path(config["run"]["folder"])).mkdir()
    fork = Job(validate(config).config, "fork", folder=folder, resume=Resume(origin=LocalStorage(origin)))
    (folder / "run.lock").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "record_attempt", lambda *_: sys.exit(9))
        with pytest.raises(SystemExit):
            run_job(fork)
    run_job(fork)


def test_a_fork_that_ends_as_it_begins_begins_again(tmp_path: Path) -> None:
    _run(_config(tmp_path / "run"))
    config = _config(tmp_path / "fork", run={"steps": 9, "folder": str(tmp_path / "fork")})
    in_world(1, _fork_twice, config, tmp_path / "run" / "checkpoints")
    storage = LocalStorage(tmp_path / "fork" / "checkpoints")
    assert list(storage.moved_aside()) == ["superseded-step-00000007"]
    assert [verify(storage, name).fault for name in storage.names()] == [None, None]


def _train_and_lose_the_best(config: dict[str, Any], how: str) -> None:
    """The checkpoint of step 4 is deleted or damaged before the run ends with it."""
    load_best = Checkpoints.load_best

    def lose(checkpoints: Checkpoints) -> None:
        best = Path(config["run"]["folder"]) / "checkpoints" / "step-00000004"
        if how == "deleted":
            shutil.rmtree(best)
        else:
            file = best / "rank-00000.safetensors"
            data = bytearray(file.read_bytes())
            data[-1] ^= 1
            file.write_bytes(data)
        load_best(checkpoints)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Checkpoints, "load_best", lose)
        _run(config)


@pytest.mark.parametrize("how", ["deleted", "damaged"])
def test_a_run_ends_with_the_best_checkpoint_that_is_left(how: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    checkpoint = {"every": None, "keep_last": 9, "best": "held-out.figure", "best_is": "lowest"}
    sections = {"evaluation": {"every": "2 steps"}, "run": {"steps": 7, "folder": str(run), "end_with": "best"}}
    in_world(1, _train_and_lose_the_best, _judged(run, ["5", "3", "4", "6"], checkpoint=checkpoint, **sections), how)
    storage = LocalStorage(run / "checkpoints")
    assert list(storage.moved_aside()) == (["broken-step-00000004"] if how == "damaged" else [])
    manifest = read_manifest(storage, "step-00000002")
    weights = load_file(run / "model" / "model.safetensors")
    saved = {name: torch.empty(tensor.shape) for name, tensor in weights.items()}
    whole = [ReadItem(f"model.{name}", manifest.tensors[f"model.{name}"].info.whole, saved[name]) for name in saved]
    Reader(storage, "step-00000002", manifest).read(whole)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in weights.items())
