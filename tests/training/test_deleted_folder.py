"""A run's folder that is deleted, moved or taken while the run trains: its saves fail, and the run continues."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import small
from kit.worlds import in_world

import lockstep
from lockstep.checkpoint.local import LocalStorage
from lockstep.checkpoint.storage import Owner
from lockstep.core.errors import RunFailed
from lockstep.monitor.folder import CONFIG, ENVIRONMENT, RunFolder
from lockstep.training import job

STEPS = 12


def _config(home: Path) -> dict[str, Any]:
    monitor = {"every": 1, "tensorboard": False, "progress": "plain"}
    checkpoint = {"every": "4 steps", "asynchronous": False}
    return small.config(run={"steps": STEPS, "folder": str(home / "run")}, monitor=monitor, checkpoint=checkpoint)


# --- what happens, on the first rank ----------------------------------------------------------------------------------


def _deleted(home: Path) -> None:
    shutil.rmtree(home / "run")


def _without_checkpoints(home: Path) -> None:
    shutil.rmtree(home / "run" / "checkpoints")


def _moved(home: Path) -> None:
    (home / "run").rename(home / "moved")


def _moved_back(home: Path) -> None:
    shutil.rmtree(home / "run", ignore_errors=True)  # what the other ranks have made of it
    (home / "moved").rename(home / "run")


def _taken(home: Path) -> None:
    """Another run begins where this one's folder was."""
    (home / "run").rename(home / "moved")
    other = RunFolder.create(home / "run")
    (home / "run" / "run.lock").write_text("process 1 on elsewhere\n")
    other.write(CONFIG, "description: another")
    other.write(ENVIRONMENT, {"run": "f" * 32})
    LocalStorage(home / "run" / "checkpoints").set_owner(Owner("f" * 32, str(home / "run"), "another"))
    other.release()


def _train(config: dict[str, Any], acts: dict[int, Callable[[Path], None]]) -> str:
    """Train; each act happens in the middle of its update. Returns the failure."""
    forward, forwards = small.Net.forward, 0

    def acting(net: small.Net, points: torch.Tensor) -> torch.Tensor:
        nonlocal forwards
        forwards += net.training
        if net.training and job.os.environ.get("RANK", "0") == "0" and forwards in acts:
            acts[forwards](Path(config["run"]["folder"]).parent)
        return forward(net, points)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(small.Net, "forward", acting)
        try:
            lockstep.train(config)
        except RunFailed as failure:
            return str(failure)
    return ""


def _run(home: Path, ranks: int, acts: dict[int, Callable[[Path], None]]) -> str:
    ended = in_world(ranks, _train, _config(home), acts) if ranks > 1 else [_train(_config(home), acts)]
    assert len(set(ended)) == 1
    return ended[0]


def _steps(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


# --- the tests --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("act", "ranks"), [(_deleted, 1), (_deleted, 2), (_without_checkpoints, 1), (_moved, 1), (_moved, 2)]
)
def test_a_run_whose_folder_is_gone_ends_with_its_weights(
    act: Callable[[Path], None], ranks: int, tmp_path: Path
) -> None:
    failure = _run(tmp_path, ranks, {6: act})
    assert f"the state after step {STEPS} could not be saved" in failure
    assert "was deleted or moved" in failure
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
    assert LocalStorage(tmp_path / "run" / "checkpoints").names() == []
    assert not (tmp_path / "run" / "summary.json").exists()
    assert act is not _moved or _steps(tmp_path / "moved") == list(range(1, STEPS + 1))


def test_an_exception_after_the_folder_is_gone_makes_no_new_one(tmp_path: Path) -> None:
    def fail(_: Path) -> None:
        raise ValueError("of the model")

    with pytest.raises(ValueError, match="of the model") as raised:
        _run(tmp_path, 1, {6: _without_checkpoints, 7: fail})
    assert "was deleted or moved" in "".join(raised.value.__notes__)
    assert not (tmp_path / "run" / "checkpoints").exists()


def test_a_folder_that_is_back_is_saved_to(tmp_path: Path) -> None:
    """The save of step 8 fails, and the one of step 12 doesn't."""
    assert _run(tmp_path, 1, {6: _moved, 10: _moved_back}) == ""
    assert LocalStorage(tmp_path / "run" / "checkpoints").names() == ["step-00000004", "step-00000012"]
    assert _steps(tmp_path / "run") == list(range(1, STEPS + 1))


@pytest.mark.parametrize("ranks", [1, 2])
def test_another_runs_folder_is_left_alone(ranks: int, tmp_path: Path) -> None:
    assert "belongs to another run now" in _run(tmp_path, ranks, {6: _taken})
    run = tmp_path / "run"
    assert LocalStorage(run / "checkpoints").names() == []
    files = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    files -= {f"logs/rank-{rank}.log" for rank in range(ranks)}  # the traceback of how it ended
    assert files == {"run.lock", "config.yaml", "environment.json", "checkpoints/owner.json"}
    assert _steps(tmp_path / "moved") == list(range(1, STEPS + 1))


def test_weights_are_not_published_in_another_runs_folder(tmp_path: Path) -> None:
    config = _config(tmp_path)
    config["checkpoint"]["folder"] = str(tmp_path / "elsewhere")
    assert "belongs to another run now" in _train(config, {6: _taken})
    assert not (tmp_path / "run" / "model").exists()
    assert LocalStorage(tmp_path / "elsewhere").names()[-1] == f"step-{STEPS:08d}"
