"""Metrics that are added to a published checkpoint: it is intact all the while, whatever fails."""

from __future__ import annotations

import contextlib
import errno
import shutil
from pathlib import Path

import pytest
import torch
from disk_faults import Disk, ends, raises
from kit.storing import save, state_of

from lockstep.checkpoint.local import LocalStorage
from lockstep.checkpoint.objects import ObjectStorage
from lockstep.checkpoint.reading import read_manifest, verify
from lockstep.checkpoint.saving import RunMetadata, Saver, StepMetadata
from lockstep.checkpoint.storage import Storage, checkpoint_name
from lockstep.distributed.collectives import LocalGroup
from lockstep.stores.blobs import UserStore

STEP = 8
NAME = checkpoint_name(STEP)
METRICS = {"held-out.loss": 0.5, "held-out.perplexity": None}


def _saved(storage: Storage) -> Storage:
    assert save(storage, [state_of({"model.a": torch.ones(8, 4)})], STEP) == []
    return storage


def _add(storage: Storage) -> str | None:
    saver = Saver(storage, LocalGroup(), torch.device("cpu"), RunMetadata("run", {}, {}))
    return saver.amend(StepMetadata(STEP, 0, 0, {"best": 0.5}, METRICS, {"history": {}}))


class Objects:
    """An object store in memory."""

    place = "memory"

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}

    def names(self, prefix: str) -> list[str]:
        return [name for name in self._objects if name.startswith(prefix)]

    def size(self, name: str) -> int:
        return len(self._objects[name])

    def read(self, name: str, offset: int, length: int) -> bytes:
        return self._objects[name][offset : offset + length]

    def write(self, name: str, data: memoryview) -> None:
        self._objects[name] = bytes(data)

    def delete(self, name: str) -> None:
        del self._objects[name]


@pytest.mark.parametrize("kind", ["folder", "object store"])
def test_only_they_change(kind: str, tmp_path: Path) -> None:
    storage = _saved(LocalStorage(tmp_path) if kind == "folder" else ObjectStorage(UserStore(Objects())))
    before = read_manifest(storage, NAME)
    assert _add(storage) is None
    after = read_manifest(storage, NAME)
    assert after.metrics == METRICS
    assert after.state == {**before.state, "best": 0.5}
    assert after.environment == {**before.environment, "history": {}}
    unchanged = {"state", "metrics", "environment"}
    assert after.model_dump(exclude=unchanged) == before.model_dump(exclude=unchanged)
    assert verify(storage, NAME).fault is None
    assert storage.names() == [NAME]


@pytest.mark.parametrize("power", ["stays", "fails, bytes are lost", "fails, names are lost too"])
@pytest.mark.parametrize("how", ["ends", "fails"])
def test_a_process_that_stops_at_any_call_leaves_an_intact_checkpoint(
    how: str, power: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, kept = tmp_path / "checkpoints", tmp_path / "kept"
    storage = _saved(LocalStorage(folder))
    shutil.copytree(folder, kept)
    disk = Disk(folder, monkeypatch)
    assert _add(storage) is None
    outcomes = set()
    for call in list(disk.calls):
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
        disk.restart()
        disk.forget()
        disk.fault = ends(call) if how == "ends" else raises(call, errno.EIO)
        with contextlib.suppress(BaseException):
            _add(storage)
        assert call in disk.calls
        if power != "stays":
            disk.lose_power(names="names" in power)
        disk.restart()
        assert verify(storage, NAME).fault is None, call
        outcomes.add(bool(read_manifest(storage, NAME).metrics))
        storage.remove_stale_drafts()
        assert [entry.name for entry in folder.iterdir()] == [NAME], f"{call}: leftovers"
    assert outcomes == {False, True}


def test_a_failure_is_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    storage = _saved(LocalStorage(tmp_path))
    disk = Disk(tmp_path, monkeypatch)
    disk.fault = raises(f"write .draft-{NAME}-manifest.json #1", errno.ENOSPC)
    assert "No space left on device" in (_add(storage) or "")
