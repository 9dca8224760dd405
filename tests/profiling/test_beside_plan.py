"""A trace beside the plan: computation at the peak, bytes sent, what differs most."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from kit.worlds import in_world
from profiling import planted
from profiling.test_gpu_traces import Recorder

from lockstep.profiling.beside_plan import beside_plan, plan_lines
from lockstep.profiling.traces import read_trace, trace_files
from lockstep.report.roofline import DevicePeak

ATTEMPT: dict[str, Any] = {
    "attempt": 1,
    "launched": 1.0,
    "began": 2.0,
    "ended_before": None,
    "step": 0,
    "seconds": 0.0,
    "hosts": [["a", 2]],
    "device": "NVIDIA H100 80GB HBM3",
    "precision": "bf16",
    "ranks": 2,
    "parameters": 1 << 20,
    "accumulation": 1,
    "flops_per_token": 6e9,
    "peak_flops": 1e15,
    "memory_bandwidth": 3e12,
    "planned": {"parameters": 4 << 20, "gradients": 4 << 20, "optimizer": 8 << 20, "sent": 4 << 20, "bubble": 0.0},
}


def _run(folder: Path, **facts: Any) -> Path:
    """1,000 tokens an update: 6e12 operations, 3 ms of each of two devices at their peak."""
    (folder / "attempts.jsonl").write_text(json.dumps({**ATTEMPT, **facts}) + "\n")
    (folder / "metrics.jsonl").write_text(
        json.dumps({"step": 11, "samples": 110, "tokens": 11_000, "loss": 1.0}) + "\n"
    )
    return folder


def test_a_gpu_beside_its_peak(tmp_path: Path) -> None:
    recorder = Recorder()
    arguments = {"Collective name": "allreduce", "dtype": "Float", "In msg nelems": 1 << 20}
    recorder.operator("aten::mm", 1000, 1100, 7600)
    recorder.operator("nccl:all_reduce", 4000, 5000, 2000, **arguments)
    trace = recorder.trace(tmp_path)
    beside = beside_plan(_run(tmp_path), [trace])
    assert beside is not None
    factors = {each.name: each for each in beside.factors}
    assert factors["computation"].predicted == pytest.approx(3e-3, rel=0.01)
    assert factors["computation"].measured == pytest.approx(7.6e-3)
    assert factors["update"].ratio == pytest.approx(10 / 3, rel=0.01)
    assert beside.mfu == pytest.approx(0.3)
    assert beside.worst is not None
    assert beside.worst.name == "computation"
    text = "\n".join(plan_lines(beside))
    assert "MFU 30.0% of the devices' peak" in text
    assert "most differs: computation, 2.5 times what is predicted: operators don't reach the device's peak" in text


def test_a_peak_that_is_not_known(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.operator("aten::mm", 1000, 1100, 7600)
    trace = recorder.trace(tmp_path)
    run = _run(tmp_path, device="cpu", peak_flops=None, memory_bandwidth=None)
    beside = beside_plan(run, [trace])
    assert beside is not None
    assert (beside.factors, beside.mfu) == ((), None)
    assert list(plan_lines(beside)) == [
        "  computation isn't predicted: the peak of cpu isn't known; --measure measures it"
    ]
    measured = beside_plan(run, [trace], DevicePeak(1e15, 3e12))
    assert measured is not None
    assert measured.mfu == pytest.approx(0.3)
    (run / "attempts.jsonl").unlink()
    assert beside_plan(run, [trace]) is None


def test_bytes_sent_are_those_of_the_plan(tmp_path: Path) -> None:
    in_world(2, planted.train_on_two, tmp_path)
    traces = [read_trace(path) for path in trace_files(tmp_path / "rank")]
    beside = beside_plan(tmp_path / "rank", traces)
    assert beside is not None
    (sent,) = (each for each in beside.factors if each.name == "bytes sent")
    assert sent.predicted == 67 * 4
    assert sent.predicted <= sent.measured < sent.predicted + 1024  # and the vote
