"""What a run has written of itself is as durable as the checkpoint beside it; what is missing is reported."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kit import small

import lockstep
from lockstep.checkpoint.local import LocalDraft


def _config(run: Path, steps: int) -> dict[str, Any]:
    monitor = {"every": 1, "tensorboard": False, "progress": "plain"}
    return small.config(run={"steps": steps, "folder": str(run)}, monitor=monitor)


def _halved(lines: list[str]) -> list[str]:
    return lines[:4]


def _emptied(lines: list[str]) -> list[str]:
    return []


def _doubled(lines: list[str]) -> list[str]:
    return lines + lines


def _with_a_hole(lines: list[str]) -> list[str]:
    return lines[:3] + lines[5:]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (_halved, "metrics.jsonl lacks 4 of 8 lines"),
        (_emptied, "metrics.jsonl lacks 8 of 8 lines"),
        (_doubled, "metrics.jsonl has 8 lines twice"),
        (_with_a_hole, "metrics.jsonl lacks 2 of 8 lines"),
        (list, None),
    ],
)
def test_a_damaged_history_is_reported(
    damage: Callable[[list[str]], list[str]], said: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    lockstep.train(_config(run, 8))
    metrics = run / "metrics.jsonl"
    metrics.write_text("".join(damage(metrics.read_text().splitlines(keepends=True))))
    capsys.readouterr()
    lockstep.train(_config(run, 9))
    shown = capsys.readouterr().out
    assert (said in shown) if said is not None else ("metrics.jsonl" not in shown)


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
    assert "metrics.jsonl" in order[: order.index("published")]
