"""The copy of the state that a save makes: the memory that it takes, and whose bytes it has.

offloaded, on the accelerator, changed by a forward  -->  chunks of page-locked memory  -->  one file
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import small
from kit.storing import Meeting
from torch import Tensor

from lockstep.checkpoint import snapshot
from lockstep.checkpoint.file_layout import file_layout
from lockstep.checkpoint.loading import load_newest
from lockstep.checkpoint.local import LocalStorage
from lockstep.checkpoint.objects import ObjectStorage
from lockstep.checkpoint.saving import RunMetadata, Saver, StepMetadata
from lockstep.checkpoint.snapshot import FileImage, Snapshot
from lockstep.checkpoint.write_plan import WriteItem
from lockstep.core.records import TrainingState
from lockstep.distributed.shard_boxes import local_shards
from lockstep.simulation.ranks import simulated_rank
from lockstep.simulation.sessions import simulated_session
from lockstep.stores.blobs import UserStore

DEVICE = "simulated:0"


def test_page_locked_memory_comes_in_chunks_off_the_main_thread(tmp_path: Path, monkeypatch: Any) -> None:
    """Before, the first save allocated one block for the whole file, and the next update waited for it."""
    monkeypatch.setattr(snapshot, "CHUNK_BYTES", 1024)
    config = small.config(launch={"device": "auto"}, parallel={"strategy": "single"})
    with simulated_session(config) as (session, simulated):
        saves = session.checkpoints(tmp_path)
        for batch in session.batches():
            session.accumulate(batch)
            session.commit()
            saves.save()
            if session.progress.steps == 2:
                break
        reports = saves.finish()
    assert [report.failure for report in reports if report.failure] == []
    sizes = [size for size, _ in simulated.execution.page_locked]
    file = (tmp_path / "step-00000001" / "rank-00000.safetensors").stat().st_size
    assert len(sizes) > 1
    assert (max(sizes), sum(sizes)) == (1024, file), "bounded, and used again by the second save"
    assert {thread for _, thread in simulated.execution.page_locked} == {"checkpoint"}


def _state(device: str, value: float) -> dict[str, Tensor]:
    """Small tensors, which have values on the simulated device."""
    tensors = {
        "model.w": torch.arange(240.0).view(12, 20),
        "model.transposed": torch.arange(120.0).view(10, 12).t(),
        "model.half": torch.arange(201, dtype=torch.bfloat16).view(3, 67),
        "model.count": torch.tensor(3),
        "model.flags": torch.ones(7, dtype=torch.bool),
        "model.empty": torch.empty(0, 4),
        "model.mean": torch.arange(33.0),
        "optimizer.offloaded.w": torch.arange(150.0),
    }
    moved = {name: tensor if "offloaded" in name else tensor.to(device) for name, tensor in tensors.items()}
    for tensor in moved.values():
        if tensor.is_floating_point():
            tensor.add_(value)
    return moved


def test_saves_from_an_accelerator_have_the_state_as_it_was(tmp_path: Path, monkeypatch: Any) -> None:
    """Forwards change some tensors at once, an update the others when it may, while memory is still allocated."""
    monkeypatch.setattr(snapshot, "CHUNK_BYTES", 256)
    storage, axis = LocalStorage(tmp_path), Meeting(1).axis(0)
    with simulated_rank(0, 1):
        saver = Saver(storage, axis, torch.device(DEVICE), RunMetadata("run", {}, {}))
        live = _state(DEVICE, 0.0)
        for step in (1, 2, 3):
            state = TrainingState(live, {}, frozenset({"model.mean"}))
            before_update = saver.start(state, StepMetadata(step, 0, 0, {}))
            live["model.mean"].add_(1.0)  # a forward
            before_update()
            for name, tensor in live.items():
                if tensor.is_floating_point() and name != "model.mean" and tensor.numel():
                    tensor.add_(1.0)
        saver.finish()
    assert [report.failure for report in saver.outcomes()] == [None] * 3
    for step in (1, 2, 3):
        expected = _state("cpu", step - 1.0)
        loaded = load_newest(storage, axis, TrainingState(expected), step)
        assert loaded is not None
        for name, tensor in expected.items():
            assert torch.equal(loaded.state.tensors[name], tensor), (step, name)


def test_an_update_waits_until_its_memory_is_allocated(monkeypatch: Any) -> None:
    allowed = threading.Event()
    with simulated_rank(0, 1):
        page_locked = snapshot.page_locked
        monkeypatch.setattr(snapshot, "page_locked", lambda size: allowed.wait(10) and page_locked(size))
        state = {"w": torch.arange(9.0).to(DEVICE)}
        items = [WriteItem("w", local_shards(state["w"]).kind, local_shards(state["w"]).boxes[0])]
        taken = Snapshot(file_layout(0, items), torch.device(DEVICE))
        taken.begin(state, ())
        saving = threading.Thread(target=taken.complete)
        waiting = threading.Thread(target=taken.before_update)
        saving.start()
        waiting.start()
        waiting.join(0.2)
        assert waiting.is_alive()
        allowed.set()
        waiting.join(10)
        saving.join(10)
    data = b"".join(taken.image.pieces())
    assert data.endswith(torch.arange(9.0).numpy().tobytes())


def test_a_rank_without_tensors_has_an_image() -> None:
    """Each save of a replica failed on an accelerator: the others wait for its file."""
    with simulated_rank(1, 2):
        taken = Snapshot(file_layout(1, []), torch.device(DEVICE))
        for _ in range(2):
            taken.begin({}, ())
            taken.complete()
    assert b"".join(taken.image.pieces()) == taken.layout.header


def test_memory_that_is_missing_costs_a_save_and_is_asked_for_again(tmp_path: Path, monkeypatch: Any) -> None:
    """Before, the run ended."""
    with simulated_rank(0, 1):
        page_locked, asked = snapshot.page_locked, []

        def sometimes(size: int) -> Tensor:
            asked.append(size)
            if len(asked) == 3:
                raise RuntimeError("CUDA error: out of memory")
            return page_locked(size)

        monkeypatch.setattr(snapshot, "CHUNK_BYTES", 256)
        monkeypatch.setattr(snapshot, "page_locked", sometimes)
        saver = Saver(LocalStorage(tmp_path), Meeting(1).axis(0), torch.device(DEVICE), RunMetadata("run", {}, {}))
        live = _state(DEVICE, 0.0)
        for step in (1, 2):
            saver.start(TrainingState(live), StepMetadata(step, 0, 0, {}))()
        saver.finish()
    failures = [report.failure for report in saver.outcomes()]
    assert failures == ["RuntimeError: CUDA error: out of memory", None]
    file = (tmp_path / "step-00000002" / "rank-00000.safetensors").stat().st_size
    assert sum(asked) - asked[2] == file, "what had been allocated was kept"


@pytest.mark.parametrize("chunk", [64, 192, 4096])
def test_chunks_hold_the_bytes_of_one_block(chunk: int) -> None:
    tensors = _state("cpu", 0.5)
    items = [
        WriteItem(name, local_shards(tensor).kind, local_shards(tensor).boxes[0]) for name, tensor in tensors.items()
    ]
    layout = file_layout(0, items)
    images = []
    for size in (layout.size, chunk):
        image = FileImage(layout, size, lambda size: torch.full((size,), 7, dtype=torch.uint8))
        image.allocate()
        sources = {index: tensors[item.name] for index, item in enumerate(layout.items)}
        image.fill(sources)
        images.append(b"".join(image.pieces()))
    assert images[0] == images[1]


class _Store:
    """An object store in memory."""

    place = "memory"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def names(self, prefix: str) -> list[str]:
        return [name for name in self.objects if name.startswith(prefix)]

    def size(self, name: str) -> int:
        return len(self.objects[name])

    def read(self, name: str, offset: int, size: int) -> bytes:
        return self.objects[name][offset : offset + size]

    def write(self, name: str, data: memoryview) -> None:
        self.objects[name] = bytes(data)

    def delete(self, name: str) -> None:
        self.objects.pop(name, None)


def test_an_object_store_gets_each_file_whole(monkeypatch: Any) -> None:
    monkeypatch.setattr(snapshot, "CHUNK_BYTES", 256)
    storage, axis = ObjectStorage(UserStore(_Store())), Meeting(1).axis(0)
    with simulated_rank(0, 1):
        saver = Saver(storage, axis, torch.device(DEVICE), RunMetadata("run", {}, {}))
        saver.start(TrainingState(_state(DEVICE, 2.0)), StepMetadata(1, 0, 0, {}))()
        saver.finish()
    expected = _state("cpu", 2.0)
    loaded = load_newest(storage, axis, TrainingState(expected))
    assert loaded is not None
    assert all(torch.equal(loaded.state.tensors[name], tensor) for name, tensor in expected.items())
