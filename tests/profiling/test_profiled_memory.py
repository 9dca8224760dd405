"""`lockstep profile memory`: what holds the memory, by category and module, counted and from a GPU's snapshot."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from kit import small
from kit.commands import run_lockstep
from kit.worlds import in_process, in_world
from profiling import held

from lockstep.core.errors import RunFailed
from lockstep.profiling.memory import MemoryProfile, memory_lines, module_rows
from lockstep.profiling.snapshot import read_snapshot, snapshot_files
from lockstep.simulation.memory import CATEGORIES, Peak


def _adds_up(peak: Peak) -> None:
    assert sum(peak.by_category.values()) == peak.bytes
    for category in CATEGORIES:
        assert sum(sizes.get(category, 0) for sizes in peak.by_module.values()) == peak.by_category[category]


@pytest.fixture(scope="module")
def peaks() -> list[tuple[Peak, int]]:
    """Those of a net and of a decoder, on one rank."""
    both: list[tuple[Peak, int]] = in_process(held.of_two_models, "single")
    return both


def test_sums_are_what_torchs_allocator_counts(peaks: list[tuple[Peak, int]]) -> None:
    for peak, allocated in peaks:
        _adds_up(peak)
        assert peak.bytes == pytest.approx(allocated, rel=0.03)


def test_sums_of_shards() -> None:
    """The profiler also counts gloo's copies, which are freed when its threads get to it: a kilobyte of the net's."""
    for rank in in_world(2, held.of_two_models_on_two, "fsdp"):
        for peak, allocated in rank:
            _adds_up(peak)
            assert peak.bytes == pytest.approx(allocated, rel=0.1, abs=1024)


def test_modules(peaks: list[tuple[Peak, int]]) -> None:
    (peak, _), (large_peak, _) = peaks
    rows = dict(module_rows(peak))
    assert rows["inner"]["parameters"] == 4 * (4 * 8 + 8)
    assert rows["inner"]["optimizer"] == 2 * rows["inner"]["parameters"]
    assert rows["head"]["parameters"] == 4 * (8 * 3 + 3)
    large = dict(module_rows(large_peak))
    assert large["blocks.0-1"]["activations"] > large["embedding"]["activations"] > 0
    assert large["blocks.0-1"]["logits"] == 0
    assert large_peak.by_category["logits"] > 0


def test_the_command_beside_the_plan(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({**small.config(), "run": {"steps": 1, "folder": "run"}}))
    assert run_lockstep("train", "run.json", cwd=tmp_path).returncode == 0
    done = run_lockstep("profile", "memory", "run", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["measured"]["bytes"] == pytest.approx(record["predicted"]["bytes"], abs=1024)
    assert abs(record["differences"]["parameters"]) < 100
    assert "three updates of 1 rank on the CPU of this machine" in done.stderr
    assert "the process holds" in done.stderr


def test_a_difference_is_named() -> None:
    predicted = Peak(1000, {**dict.fromkeys(CATEGORIES, 0), "activations": 800, "parameters": 200}, {})
    measured = Peak(2200, {**predicted.by_category, "activations": 2000}, {"body": {"activations": 2000}})
    profile = MemoryProfile("three updates", measured, predicted, "", 5000, on_cpu=False)
    text = "\n".join(memory_lines(profile))
    assert "it is 2.20 times what the plan predicts, above all in activations: 1.17 KiB more (samples" in text
    assert "activations       1.95 KiB   90.9%       800 B   +1.17 KiB" in text
    assert "has reserved 4.88 KiB of the GPU: 2.73 KiB more than the tensors' peak" in text
    unknown = MemoryProfile("three updates", measured, None, "its forward reads values", 5000, on_cpu=True)
    assert "the plan can't predict it: its forward reads values" in "\n".join(memory_lines(unknown))


# --- snapshots, in the format that the docstring of torch.cuda.memory._snapshot has ---------------------------------

MIB = 1 << 20
FORWARD = [
    {"filename": "/env/torch/nn/functional.py", "line": 2300, "name": "linear"},
    {"filename": "/home/me/model.py", "line": 12, "name": "forward"},
    {"filename": "/env/torch/nn/modules/module.py", "line": 1780, "name": "_call_impl"},
]
OPTIMIZER = [{"filename": "/env/torch/optim/adamw.py", "line": 520, "name": "_multi_tensor_adamw"}]


def _block(size: int, state: str = "active_allocated", requested: int | None = None) -> dict[str, Any]:
    return {"size": size, "requested_size": requested or size, "state": state, "frames": []}


def _event(action: str, address: int, size: int, frames: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"action": action, "addr": address, "size": size, "stream": 0, "frames": frames or []}


def _content() -> dict[str, Any]:
    """Two updates: 4 MiB of parameters, 8 of optimizer state, 5 of activations, 4 of gradients, 3 of a step."""
    base = 0x7F0000000000
    update = [
        _event("alloc", base + 16 * MIB, 5 * MIB, FORWARD),
        _event("alloc", base + 12 * MIB, 4 * MIB),
        _event("free_requested", base + 16 * MIB, 5 * MIB),
        _event("free_completed", base + 16 * MIB, 5 * MIB),
        _event("alloc", base + 16 * MIB, 3 * MIB, OPTIMIZER),
        _event("free_completed", base + 16 * MIB, 3 * MIB),
    ]
    blocks = [_block(4 * MIB, requested=4 * MIB - 100), _block(8 * MIB), _block(4 * MIB), _block(16 * MIB, "inactive")]
    segment = {"address": base, "total_size": 32 * MIB, "stream": 0, "device": 0, "segment_type": "large"}
    return {
        "segments": [{**segment, "blocks": blocks}],
        "device_traces": [[*update, _event("free_completed", base + 12 * MIB, 4 * MIB), *update]],
        "lockstep": {
            "facts": {"rank": 0, "ranks": 1, "first": 10, "last": 11, "host": "a", "device": "cuda"},
            "index": 0,
            "owners": [
                (base, "parameters", "inner.weight"),
                (base + MIB, "parameters", "inner.bias"),
                (base + 12 * MIB, "gradients", "inner.weight"),
                (base + 15 * MIB, "gradients", "head.weight"),
            ],
        },
    }


def _written(folder: Path, content: object) -> Path:
    (folder / "profile").mkdir(exist_ok=True)
    path = folder / "profile" / "rank0.10.memory.pickle"
    path.write_bytes(pickle.dumps(content))
    return path


def test_a_snapshot(tmp_path: Path) -> None:
    snapshot = read_snapshot(_written(tmp_path, _content()))
    assert snapshot.peak.bytes == 21 * MIB
    held_then = {name: size // MIB for name, size in snapshot.peak.by_category.items() if size}
    assert held_then == {"parameters": 4, "gradients": 4, "optimizer": 8, "activations": 5}
    _adds_up(snapshot.peak)
    assert snapshot.peak.by_module["inner"] == {"parameters": 4 * MIB}
    assert snapshot.peak.by_module["model.py:12 forward"] == {"activations": 5 * MIB}
    assert (snapshot.reserved, snapshot.unused) == (32 * MIB, 16 * MIB)
    assert (snapshot.rounding, snapshot.largest_gap) == (100, 16 * MIB)


def test_a_snapshot_that_would_run_code(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="only plain values"):
        read_snapshot(_written(tmp_path, {"segments": [Path("/")]}))
    with pytest.raises(RunFailed, match="record it again"):
        read_snapshot(_written(tmp_path, [1, 2]))
    path = _written(tmp_path, _content())
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(RunFailed, match="record it again"):
        read_snapshot(path)


def test_the_command_reads_a_runs_snapshot(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({**small.config(), "run": {"steps": 1, "folder": "run"}}))
    assert run_lockstep("train", "run.json", cwd=tmp_path).returncode == 0
    _written(tmp_path / "run", _content())
    assert len(snapshot_files(tmp_path / "run")) == 1
    done = run_lockstep("profile", "memory", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "peak of a rank: 21.0 MiB of tensors, in updates 10 to 11 of rank 0" in done.stdout
    assert "has reserved 32.0 MiB of the GPU: 11.0 MiB more than the tensors' peak" in done.stdout
    assert "keeps 16.0 MiB that hold nothing, in pieces of at most 16.0 MiB" in done.stdout
    assert "times what the plan predicts, above all in optimizer" in done.stdout
