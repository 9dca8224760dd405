"""One rank may be busy for longer than `launch.timeout` allows a collective: the others wait for it in a barrier.

rank 1   reads, downloads, tokenizes, writes ... until rank 0 is in a barrier      an error if it never comes
rank 0   barrier
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from kit import small
from kit.worlds import in_world

import lockstep
from lockstep.assembly import deciding
from lockstep.checkpoint.local import LocalDraft, LocalStorage
from lockstep.checkpoint.reading import Reader
from lockstep.checkpoint.retention import Retention
from lockstep.distributed.collectives import RankGroup
from lockstep.resuming import resuming
from lockstep.training import assemble, job, publishing

_PATIENCE_S = 5.0
_BUSY: dict[str, tuple[Any, str, int]] = {
    "data": (assemble, "open_sources", 1),
    "auto": (deciding, "_decision", 0),
    "weights": (assemble, "match_initial_weights", 1),
    "drafts that are left": (LocalStorage, "remove_stale_drafts", 0),
    "the save's file": (LocalDraft, "write", 1),
    "its manifest": (LocalDraft, "publish", 0),
    "older checkpoints": (Retention, "on_published", 0),
    "newer checkpoints": (resuming, "move_newer_aside", 0),
    "a checkpoint that is read": (Reader, "read", 1),
    "the run's folder": (job, "recorded", 0),
    "the new folder of weights": (publishing, "temporary", 0),
    "the report": (job, "write_report", 0),
}
"""What may take long, and the rank for which it does."""


def _until_others_wait(folder: Path, name: str, original: Callable[..., Any], rank: int) -> Callable[..., Any]:
    other = folder / f"waits-{1 - rank}"

    def busy(*arguments: Any, **named: Any) -> Any:
        if os.environ["RANK"] == str(rank):
            until = time.monotonic() + _PATIENCE_S
            while not other.exists():
                assert time.monotonic() < until, f"{name}: rank {1 - rank} waits in a collective"
                time.sleep(0.002)
            (folder / f"waited for {name}").touch()
        return original(*arguments, **named)

    return busy


def _train(folder: Path) -> None:
    barrier, own = RankGroup.barrier, folder / f"waits-{os.environ['RANK']}"

    def noted(axis: RankGroup) -> None:
        own.touch()
        barrier(axis)
        own.unlink()

    config = small.config(
        launch={"device": "cpu", "ranks": 2},
        parallel={"strategy": "auto"},
        checkpoint={"every": "1 step", "keep_last": 1},
    )
    with ExitStack() as stack:
        stack.enter_context(patch.object(RankGroup, "barrier", noted))
        for name, (place, attribute, rank) in _BUSY.items():
            original = getattr(place, attribute)
            stack.enter_context(patch.object(place, attribute, _until_others_wait(folder, name, original, rank)))
        for steps in (2, 3):
            lockstep.train({**config, "run": {"folder": str(folder / "run"), "steps": steps}})


def test_ranks_wait_for_a_busy_one_in_a_barrier(tmp_path: Path) -> None:
    in_world(2, _train, tmp_path)
    waited = {path.name.removeprefix("waited for ") for path in tmp_path.glob("waited for *")}
    assert waited == set(_BUSY)
