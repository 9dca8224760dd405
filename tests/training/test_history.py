"""What a run has written of itself is as durable as the checkpoint beside it; what is missing is reported."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import small
from kit.worlds import served

import lockstep
from lockstep.checkpoint.local import LocalDraft
from lockstep.checkpoint.saving import Saver, StepMetadata
from lockstep.core.records import Batch, TrainingState
from lockstep.monitor.tensorboard import records

Damage = Callable[[list[bytes]], list[bytes]]


def _config(run: Path, steps: int) -> dict[str, Any]:
    monitor = {"every": 1, "tensorboard": True, "progress": "plain"}
    section = {"every": "4 steps"}
    return small.config(run={"steps": steps, "folder": str(run)}, monitor=monitor, checkpoint=section)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps, which tests copy."""
    run = tmp_path_factory.mktemp("history") / "run"
    lockstep.train(_config(run, 8))
    return run


def _halved(pieces: list[bytes]) -> list[bytes]:
    return pieces[: len(pieces) // 2]


def _emptied(pieces: list[bytes]) -> list[bytes]:
    return []


def _doubled(pieces: list[bytes]) -> list[bytes]:
    return pieces + pieces


def _with_a_hole(pieces: list[bytes]) -> list[bytes]:
    return pieces[:1] + pieces[2:]


def _changed(pieces: list[bytes]) -> list[bytes]:
    return [pieces[0].replace(b'"step": 1', b'"step": 0').replace(b'"step": 4', b'"step": 3'), *pieces[1:]]


_HISTORIES = ["metrics.jsonl", "events.jsonl", "tensorboard/events.out.tfevents.*"]
_REPORTED = {
    _halved: r"{name}\S* lacks \d of \d+ (lines|events) that were written before",
    _emptied: r"{name}\S* lacks (\d+) of \1 (lines|events) that were written before",
    _doubled: r"{name}\S* has \d+ (lines|events) twice",
    _with_a_hole: r"{name}\S* (lacks 1 of \d+ lines that were written before|is not what was written)",
    _changed: r"{name}\S* is not what was written: lines are missing or were changed",
}
_ROWS = [(name, damage) for name in _HISTORIES for damage in _REPORTED if "*" not in name or damage is not _changed]


def _resumed(run: Path, capsys: pytest.CaptureFixture[str], steps: int = 9) -> str:
    """Resume the run up to a step; return what is shown, unwrapped."""
    capsys.readouterr()
    lockstep.train(_config(run, steps))
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(("name", "damage"), _ROWS)
def test_a_damaged_history_is_reported(
    name: str, damage: Damage, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    (file,) = run.glob(name)
    data = file.read_bytes()
    file.write_bytes(b"".join(damage(list(records(data)) if "*" in name else data.splitlines(keepends=True))))
    wanted = _REPORTED[damage].format(name=re.escape(name.rstrip("*")))
    assert re.search(wanted, _resumed(run, capsys))


def test_a_deleted_history_is_reported(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    for name in _HISTORIES:
        (file,) = run.glob(name)
        file.unlink()
    assert _resumed(run, capsys).count("that were written before") == len(_HISTORIES)


@pytest.mark.parametrize("start", ["latest", "earlier"])
def test_a_whole_history_is_not_reported(
    start: str, finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    if start == "earlier":
        shutil.rmtree(run / "checkpoints" / "step-00000008")
    for steps in (9, 10):  # what the second finds was written by two attempts
        assert not re.search("lacks|twice|changed", _resumed(run, capsys, steps))


def _train_until_killed(run: str, save_4_is_slow: bool) -> None:
    """Train until the save of step 8 exists.

    A slow save of step 4 is published only once that of step 8 waits for it; no update is made after that.
    """
    publish, finish, start, waits = LocalDraft.publish, Saver.finish, Saver.start, threading.Event()

    def published(draft: LocalDraft, manifest: bytes) -> None:
        if save_4_is_slow and draft._target.name == "step-00000004":
            waits.wait(30)
        publish(draft, manifest)
        if draft._target.name == "step-00000008":
            os.kill(os.getpid(), signal.SIGKILL)

    def finished(saver: Saver) -> None:
        if saver._save is not None:
            waits.set()
        finish(saver)

    def started(saver: Saver, state: TrainingState, metadata: StepMetadata, *arguments: Any) -> Any:
        wait_for_copies = start(saver, state, metadata, *arguments)
        if save_4_is_slow and metadata.step == 8:
            threading.Event().wait(30)  # until the process is killed
        return wait_for_copies

    LocalDraft.publish, Saver.finish, Saver.start = published, finished, started  # type: ignore[method-assign]
    lockstep.train(_config(Path(run), 400))


@pytest.mark.parametrize("save_4_is_slow", [False, True])
def test_a_kill_right_after_a_save_takes_nothing_that_came_before(
    save_4_is_slow: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    process = served().Process(target=_train_until_killed, args=(str(run), save_4_is_slow))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)[:8]]
    assert steps == list(range(1, 9))
    saved = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["saved"] for event in saved if "saved" in event] == [4]
    assert not re.search("lacks|twice|changed", _resumed(run, capsys))


def test_history_is_flushed_before_a_checkpoint_exists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    fsync, publish = os.fsync, LocalDraft.publish

    def seen(handle: int) -> None:
        order.append(os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def published(draft: LocalDraft, manifest: bytes) -> None:
        order.append("published")
        publish(draft, manifest)

    monkeypatch.setattr(os, "fsync", seen)
    monkeypatch.setattr(LocalDraft, "publish", published)
    lockstep.train(_config(tmp_path / "run", 4))
    before = order[: order.index("published")]
    assert {"metrics.jsonl", "events.jsonl"} <= set(before)
    assert any(name.startswith("events.out.tfevents.") for name in before)


class _LogsLosses(small.CrossEntropy):
    """Logs in training, and fails once, in update 4."""

    def __init__(self) -> None:
        self._updates = 0

    def loss_sum(self, outputs: torch.Tensor, batch: Batch) -> torch.Tensor:
        loss = super().loss_sum(outputs, batch)
        if outputs.requires_grad:
            self._updates += 1
            if self._updates == 4:
                raise ValueError("planted")
            lockstep.log.mean("own", loss.detach(), batch.samples)
        return loss


def test_what_the_first_update_after_a_failure_logs_has_its_line(tmp_path: Path) -> None:
    config = _config(tmp_path, 6) | {"batch": {"global_size": 8}}
    del config["objective"]
    objective = _LogsLosses()
    with pytest.raises(ValueError, match="planted"):
        lockstep.train(config, objective=objective)
    lockstep.train(config, objective=objective)
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [event["step"] for event in events if "logged" in event] == [2, 3, 4, 5, 6]
