"""Snapshots in memory: the last rank to write publishes, the newest two stay, and a torn one isn't used."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.storing import Meeting, rank_states, save, state_of, together

from lockstep.checkpoint import reading
from lockstep.checkpoint.loading import load_newest
from lockstep.checkpoint.local import LocalStorage
from lockstep.checkpoint.memory_saving import MemorySaver, WithMemory
from lockstep.checkpoint.saving import RunMetadata, StepMetadata
from lockstep.distributed.collectives import LocalGroup

WEIGHT = torch.arange(24.0).reshape(4, 6)


def take(folder: Path, steps: list[int], ranks: int = 2, act: Any = None) -> list[MemorySaver]:
    """Take snapshots of these steps on some ranks."""
    meeting, savers = Meeting(ranks), {}

    def rank(number: int) -> None:
        storage = LocalStorage(folder, "run")
        saver = savers[number] = MemorySaver(
            storage,
            meeting.axis(number),
            torch.device("cpu"),
            RunMetadata("run", {}, {"host": "a"} if not number else {}),
        )
        for step in steps:
            state = rank_states({"model.weight": WEIGHT + step}, ranks, 0)[number]
            metadata = StepMetadata(step, 10 * step, 100 * step, {"sharding": {}})
            saver.start(state, metadata, time.perf_counter())()
            if act is not None:
                act(number)
        saver.finish()

    together(ranks, rank)
    return [savers[number] for number in range(ranks)]


def loaded(storage: Any) -> tuple[int, torch.Tensor, list[str]]:
    """The step that a run resumes from, its weight, and what could not be used."""
    checkpoint = load_newest(storage, LocalGroup(), state_of({"model.weight": torch.empty(4, 6)}))
    assert checkpoint is not None
    return checkpoint.manifest.step, checkpoint.state.tensors["model.weight"], [*checkpoint.broken]


def test_the_newest_two_stay(tmp_path: Path) -> None:
    savers = take(tmp_path, [1, 2, 3, 4], ranks=3)
    assert [saver.failure for saver in savers] == [None] * 3
    assert LocalStorage(tmp_path).names() == ["step-00000003", "step-00000004"]
    step, weight, _ = loaded(LocalStorage(tmp_path))
    assert step == 4
    assert torch.equal(weight, WEIGHT + 4)
    assert sorted(path.name for path in (tmp_path / "step-00000004").iterdir()) == [
        "manifest.json", *(f"rank-0000{rank}.safetensors" for rank in range(3))
    ]  # fmt: skip


def test_a_rank_that_can_not_write_costs_that_snapshot_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = LocalStorage.begin
    monkeypatch.setattr(
        LocalStorage, "begin", lambda self, name: begin(self, name) if name != "step-00000002" else fail(name)
    )
    take(tmp_path, [1, 2, 3])
    assert LocalStorage(tmp_path).names() == ["step-00000001", "step-00000003"]


def fail(name: str) -> Any:
    raise OSError(28, "No space left on device", name)


@pytest.mark.parametrize(("broken", "step"), [([], 9), (["step-00000009"], 8), (["step-00000009", "step-00000008"], 5)])
def test_a_run_resumes_from_the_newest_that_is_intact(tmp_path: Path, broken: list[str], step: int) -> None:
    disk, memory = LocalStorage(tmp_path / "disk"), LocalStorage(tmp_path / "memory", "run")
    assert save(disk, rank_states({"model.weight": WEIGHT + 5}, 2, 0), 5) == []
    take(tmp_path / "memory", [8, 9])
    for name in broken:
        file = tmp_path / "memory" / name / "rank-00001.safetensors"
        data = bytearray(file.read_bytes())
        data[-1] ^= 1
        file.write_bytes(data)
    resumed, weight, unused = loaded(WithMemory(disk, memory))
    assert (resumed, unused) == (step, broken)
    assert torch.equal(weight, WEIGHT + step)


@pytest.mark.parametrize("few", [0, reading._FEW_BYTES], ids=["by threads", "by one"])
def test_a_flipped_byte_is_detected_whichever_thread_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, few: int
) -> None:
    monkeypatch.setattr(reading, "_FEW_BYTES", few)
    take(tmp_path, [1, 2])
    step, weight, _ = loaded(LocalStorage(tmp_path))
    assert (step, torch.equal(weight, WEIGHT + 2)) == (2, True)
    file = tmp_path / "step-00000002" / "rank-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    step, weight, broken = loaded(LocalStorage(tmp_path))
    assert (step, torch.equal(weight, WEIGHT + 1), broken) == (1, True, ["step-00000002"])


def test_another_runs_snapshot_is_not_used(tmp_path: Path) -> None:
    disk, memory = LocalStorage(tmp_path / "disk", "other"), LocalStorage(tmp_path / "memory", "other")
    assert save(disk, rank_states({"model.weight": WEIGHT + 5}, 2, 0), 5, "other") == []
    take(tmp_path / "memory", [8])
    assert loaded(WithMemory(disk, memory))[0] == 5


def test_what_the_storage_has_is_not_read_from_memory(tmp_path: Path) -> None:
    disk, memory = LocalStorage(tmp_path / "disk"), LocalStorage(tmp_path / "memory", "run")
    take(tmp_path / "memory", [4, 5])
    assert save(disk, rank_states({"model.weight": WEIGHT + 5}, 2, 0), 5) == []
    assert loaded(WithMemory(disk, memory))[0] == 5
    assert memory.names() == ["step-00000004"]
