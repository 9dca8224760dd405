"""A run's folder that is deleted, moved or taken during the run."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import small
from kit.commands import run_lockstep
from kit.worlds import in_world
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import lockstep
from lockstep.checkpoint import inspection
from lockstep.checkpoint.local import LocalDraft, LocalStorage
from lockstep.checkpoint.ownership import Owner
from lockstep.core.errors import RunFailed
from lockstep.monitor.folder import RunFolder
from lockstep.training import job
from lockstep.training.session import components_of

STEPS, AT = 12, 6
_PATIENCE_S = 60
_TWO_LOOKS_S = 1.2  # of the watch, which looks every half second


def _config(home: Path, **checkpoint: Any) -> dict[str, Any]:
    monitor = {"every": 1, "tensorboard": True, "progress": "plain"}
    section = {"every": "4 steps", "asynchronous": False, **checkpoint}
    return small.config(run={"steps": STEPS, "folder": str(home / "run")}, monitor=monitor, checkpoint=section)


def _wait_until(made: Callable[[], bool]) -> None:
    deadline = time.monotonic() + _PATIENCE_S
    while not made():
        assert time.monotonic() < deadline, "it isn't made again"
        time.sleep(0.05)


# --- what happens, on the first rank in the middle of an update -----------------------------------------------------


def _deleted(home: Path) -> None:
    shutil.rmtree(home / "run")
    _wait_until((home / "run" / "checkpoints" / "owner.json").exists)


def _emptied(home: Path) -> None:
    for entry in (home / "run").iterdir():
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
    _wait_until((home / "run" / "checkpoints" / "owner.json").exists)


def _moved(home: Path) -> None:
    (home / "run").rename(home / "moved")
    _wait_until((home / "run" / "checkpoints" / "owner.json").exists)


def _without_checkpoints(home: Path) -> None:
    shutil.rmtree(home / "run" / "checkpoints")
    _wait_until((home / "run" / "checkpoints" / "owner.json").exists)


def _without_newest(home: Path) -> None:
    shutil.rmtree(home / "run" / "checkpoints" / "step-00000004")
    time.sleep(_TWO_LOOKS_S)


def _without_history(home: Path) -> None:
    for name in ("metrics.jsonl", "events.jsonl"):
        (home / "run" / name).unlink()
    _wait_until((home / "run" / "metrics.jsonl").exists)


def _without_elsewhere(home: Path) -> None:
    shutil.rmtree(home / "elsewhere")
    _wait_until((home / "elsewhere" / "owner.json").exists)


def _train(config: dict[str, Any], act: Callable[[Path], None]) -> list[str]:
    """Trains; `act` happens in the middle of update 6. Returns what the first rank warned of."""
    forward, forwards = small.Net.forward, 0
    warned: list[str] = []

    def acting(net: small.Net, points: torch.Tensor) -> torch.Tensor:
        nonlocal forwards
        forwards += net.training
        if forwards == AT and net.training and job.os.environ.get("RANK", "0") == "0":
            act(Path(config["run"]["folder"]).parent)
        return forward(net, points)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small.Net, "forward", acting)
        patch.setattr("lockstep.training.folder_watch._log.warning", lambda text, *more: warned.append(text % more))
        lockstep.train(config)
    return warned


def _assert_whole(home: Path) -> None:
    run = home / "run"
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == list(range(1, STEPS + 1))
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["epoch_done"] for event in events if "epoch_done" in event] == [0, 1, 2]
    curves = EventAccumulator(str(run / "tensorboard"), size_guidance={"scalars": 0}).Reload()
    assert {1, STEPS} <= {event.step for event in curves.Scalars("train/loss")}
    assert json.loads((run / "summary.json").read_text())["steps"] == STEPS


@pytest.mark.parametrize(
    ("act", "ranks", "said"),
    [
        (_deleted, 1, "or a part of it, was deleted or moved"),
        (_deleted, 2, "or a part of it, was deleted or moved"),
        (_emptied, 1, "or a part of it, was deleted or moved"),
        (_moved, 2, "was deleted or moved"),
        (_without_checkpoints, 1, "checkpoints in {home}/run/checkpoints were deleted"),
        (_without_newest, 1, "checkpoints in {home}/run/checkpoints were deleted"),
        (_without_elsewhere, 2, "checkpoints in {home}/elsewhere were deleted"),
        (_without_history, 1, None),
    ],
)
def test_what_is_deleted_is_made_again(
    act: Callable[[Path], None], ranks: int, said: str | None, tmp_path: Path
) -> None:
    elsewhere = act is _without_elsewhere
    config = _config(tmp_path, **({"folder": str(tmp_path / "elsewhere")} if elsewhere else {}))
    warned = (in_world(ranks, _train, config, act) if ranks > 1 else [_train(config, act)])[0]
    assert len(warned) == (said is not None)
    assert said is None or said.format(home=tmp_path) in warned[0]
    _assert_whole(tmp_path)
    storage = LocalStorage(tmp_path / "elsewhere" if elsewhere else tmp_path / "run" / "checkpoints")
    found = inspection.verify_all(storage)
    assert all(one.fault is None for one in found)
    steps = [int(name.removeprefix("step-")) for name in storage.names()]
    assert steps[-1] == STEPS
    assert (4 in steps) == (said is None)


def _deleted_and_failed(home: Path) -> None:
    shutil.rmtree(home / "run")
    raise LookupError("a file in the run's folder is gone")


def test_a_failure_after_a_deletion_is_saved_in_a_folder_that_is_a_runs(tmp_path: Path) -> None:
    """No look of the watch comes in between."""
    with pytest.raises(LookupError):
        _train(_config(tmp_path), _deleted_and_failed)
    assert LocalStorage(tmp_path / "run" / "checkpoints").names() == [f"step-{AT - 1:08d}"]
    lockstep.train(_config(tmp_path))
    _assert_whole(tmp_path)


def test_commands_take_a_folder_that_was_made_again(tmp_path: Path) -> None:
    in_world(1, _train, _config(tmp_path), _deleted)
    run = tmp_path / "run"
    for words in (
        ("ckpt", "verify", run),
        ("ckpt", "audit", run),
        ("report", run),
        ("export", run, "--to", tmp_path / "weights"),
        ("train", run, f"run.steps={STEPS + 2}"),
    ):
        done = run_lockstep(*words, "--trust-run") if words[0] in ("export", "train") else run_lockstep(*words)
        assert done.returncode == 0, f"{words}: {done.stderr}"
    assert LocalStorage(run / "checkpoints").names()[-1] == f"step-{STEPS + 2:08d}"


def test_a_deletion_in_a_save_costs_that_save_alone(tmp_path: Path) -> None:
    publish = LocalDraft.publish

    def deleted(draft: LocalDraft, manifest: bytes) -> None:
        if draft._target.name == "step-00000008":
            _deleted(tmp_path)
        publish(draft, manifest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalDraft, "publish", deleted)
        lockstep.train(_config(tmp_path))
    _assert_whole(tmp_path)
    names = LocalStorage(tmp_path / "run" / "checkpoints").names()
    assert names[-1] == f"step-{STEPS:08d}"
    assert "step-00000008" not in names


def _train_and_delete_at_the_end(config: dict[str, Any]) -> None:
    publish = job.publish

    def deleted(session: Any, folder: Any) -> Any:
        if components_of(session).world.rank == 0:
            shutil.rmtree(config["run"]["folder"])
        return publish(session, folder)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job, "publish", deleted)
        lockstep.train(config)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_deletion_after_the_last_save_makes_another(ranks: int, tmp_path: Path) -> None:
    in_world(ranks, _train_and_delete_at_the_end, _config(tmp_path))
    _assert_whole(tmp_path)
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    assert LocalStorage(tmp_path / "run" / "checkpoints").names() == [f"step-{STEPS:08d}"]


def _with_a_file_in_its_place(home: Path) -> None:
    shutil.rmtree(home / "run")
    (home / "run").write_text("in the way")
    time.sleep(_TWO_LOOKS_S)


def _failure(config: dict[str, Any], act: Callable[[Path], None]) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path(config["run"]["folder"]).parent)
        with pytest.raises(RunFailed) as failed:
            _train(config, act)
    return str(failed.value)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_folder_that_cannot_be_made_again_fails_at_the_end(ranks: int, tmp_path: Path) -> None:
    (message,) = set(in_world(ranks, _failure, _config(tmp_path), _with_a_file_in_its_place))
    assert message.startswith(f"the state after step {STEPS} could not be saved")
    assert not [*tmp_path.glob("run-*")]


def _taken(home: Path) -> None:
    """Another run begins where this one's folder was."""
    (home / "run").rename(home / "moved")
    other = RunFolder.create(home / "run")
    (home / "run" / "run.lock").write_text("process 1 on elsewhere\n")
    other.write_config("description: another")
    other.write_environment({"run": "f" * 32})
    LocalStorage(home / "run" / "checkpoints").set_owner(Owner("f" * 32, str(home / "run"), "another"))
    time.sleep(_TWO_LOOKS_S)
    assert other.path == home / "run"


@pytest.mark.parametrize("ranks", [1, 2])
def test_another_runs_folder_is_left_alone(ranks: int, tmp_path: Path) -> None:
    (message,) = set(in_world(ranks, _failure, _config(tmp_path), _taken))
    assert "belongs to another run now" in message
    run = tmp_path / "run"
    assert LocalStorage(run / "checkpoints").names() == []
    files = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    assert files == {"run.lock", "config.yaml", "environment.json", "checkpoints/owner.json"}
    assert len((tmp_path / "moved" / "metrics.jsonl").read_text().splitlines()) == STEPS
