"""`lockstep profile memory`: what holds the memory, by category and module."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kit import small
from kit.commands import run_lockstep
from kit.failures import gives
from kit.worlds import in_process, in_world
from profiling import held

from lockstep.monitor.folder import CONFIG, RunFolder
from lockstep.profiling.memory import memory_lines, module_rows
from lockstep.simulation.memory import CATEGORIES, Peak
from lockstep.simulation.planning import MeasuredMemory


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
    assert gives(done.stderr, "three updates", "1 rank", "CPU")
    assert "the process holds" in done.stderr


def test_a_difference_is_named() -> None:
    predicted = Peak(1000, {**dict.fromkeys(CATEGORIES, 0), "activations": 800, "parameters": 200}, {})
    measured = Peak(2200, {**predicted.by_category, "activations": 2000}, {"body": {"activations": 2000}})
    profile = MeasuredMemory(predicted, "", measured, 5000, 1, on_cpu=False)
    text = "\n".join(memory_lines(profile))
    assert gives(text, "2.20 times", "activations", "1.17 KiB")
    assert "activations  1.95 KiB   90.9%      800 B   +1.17 KiB" in text
    assert gives(text, "4.88 KiB", "2.73 KiB")
    unknown = MeasuredMemory(None, "its forward reads values", measured, 5000, 1, on_cpu=True)
    assert gives("\n".join(memory_lines(unknown)), "its forward reads values")


def test_new_ranks_are_not_measured_beside_a_run_that_has_the_gpus(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({**small.config(), "run": {"steps": 1, "folder": "run"}}))
    run = RunFolder.create(tmp_path / "run")
    run.write(CONFIG, (tmp_path / "run.json").read_text())
    attempt = {"launched": 1.0, "began": 2.0, "step": 0, "seconds": 0.0, "device": "NVIDIA H200"}
    (run.path / "attempts.jsonl").write_text(json.dumps(attempt) + "\n")
    refused = run_lockstep("profile", "memory", "run", cwd=tmp_path)
    run.release()
    assert refused.returncode == 1
    assert gives(refused.stderr, "GPUs", "lockstep profile run")
