"""A disk without space for one more checkpoint: the oldest is deleted, once a newer one is whole."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
from kit import small
from kit.failures import fails
from kit.worlds import in_world

import lockstep
from lockstep.checkpoint import inspection
from lockstep.checkpoint.local import LocalDraft, LocalStorage
from lockstep.core.errors import RunFailed
from lockstep.core.failure_kinds import FailureKind


def _train_with_room_for(config: dict[str, Any], number: int, broken: tuple[str, ...] = ()) -> dict[str, Any]:
    """Use a disk on which no file can be written while it has this many checkpoints."""
    place = LocalStorage(Path(config["run"]["folder"]) / "checkpoints")
    write = LocalDraft.write

    def full(draft: LocalDraft, file: str, data: memoryview) -> None:
        for name in broken:
            damaged = Path(place.place, name, "rank-00000.safetensors")
            if damaged.exists() and name in place.names():
                damaged.write_bytes(bytes(damaged.stat().st_size))
        if len(place.names()) >= number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(draft, file, data)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LocalDraft, "write", full)
        return lockstep.train(config).summary


def _config(run: Path, **checkpoint: Any) -> dict[str, Any]:
    section = {"every": "4 steps", "keep_last": 3, "asynchronous": False, **checkpoint}
    return small.config(checkpoint=section, run={"steps": 16, "folder": str(run)})


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_oldest_gives_way(ranks: int, tmp_path: Path) -> None:
    run = tmp_path / "run"
    in_world(ranks, _train_with_room_for, _config(run), 2)
    storage = LocalStorage(run / "checkpoints")
    assert storage.names()[-1] == "step-00000016"
    assert len(storage.names()) == 2
    assert all(one.fault is None for one in inspection.verify_all(storage))


def test_the_last_one_never_does(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with fails(RunFailed, os.strerror(errno.ENOSPC), kind=FailureKind.SAVE_FAILED):
        _train_with_room_for(_config(run), 1)
    assert LocalStorage(run / "checkpoints").names() == ["step-00000004"]


def test_the_last_whole_one_never_does(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with fails(RunFailed, os.strerror(errno.ENOSPC), kind=FailureKind.SAVE_FAILED):
        _train_with_room_for(_config(run), 2, broken=("step-00000008",))
    assert LocalStorage(run / "checkpoints").names() == ["step-00000004", "step-00000008"]


def test_what_is_kept_for_good_stays(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with fails(RunFailed, os.strerror(errno.ENOSPC), kind=FailureKind.SAVE_FAILED):
        _train_with_room_for(_config(run, keep_every="4 steps"), 2)
    assert LocalStorage(run / "checkpoints").names() == ["step-00000004", "step-00000008"]
