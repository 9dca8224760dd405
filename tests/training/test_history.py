"""What a run has written of itself is as durable as the checkpoint beside it."""

from __future__ import annotations

import json
import os
import signal
import threading
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


def _config(run: Path, steps: int) -> dict[str, Any]:
    monitor = {"every": 1, "tensorboard": True, "progress": "plain"}
    section = {"every": "4 steps"}
    return small.config(run={"steps": steps, "folder": str(run)}, monitor=monitor, checkpoint=section)


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
def test_a_kill_right_after_a_save_takes_nothing_that_came_before(save_4_is_slow: bool, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = served().Process(target=_train_until_killed, args=(str(run), save_4_is_slow))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_bytes().splitlines(keepends=True)[:8]]
    assert steps == list(range(1, 9))
    saved = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    assert [event["saved"] for event in saved if "saved" in event] == [4]


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
