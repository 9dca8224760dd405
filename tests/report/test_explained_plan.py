"""A run beside its plan and the peaks of its devices, from fabricated files."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kit.commands import run_lockstep
from kit.failures import gives
from simulation.test_step_time import large

from lockstep.assembly.user_objects import UserObjects
from lockstep.core.formatting import short_time
from lockstep.monitor.attempts import Attempt, Planned, attempts_text
from lockstep.plan.gpus import parse_cluster
from lockstep.report.explanation import explain
from lockstep.simulation.estimate import estimator_of

GPU = Attempt(
    launched=1.79e9,
    began=1.79e9 + 10,
    hosts=(("a", 8),),
    facts={
        "device": "NVIDIA H100 80GB HBM3", "precision": "bf16", "ranks": 8, "accumulation": 2, "parameters": 10**9,
        "flops_per_token": 6e9, "peak_flops": 989.5e12, "memory_bandwidth": 3.35e12,
    },
    planned=Planned(4 * 2**30, 4 * 2**30, 8 * 2**30, 0.0),
)  # fmt: skip


def write_run(folder: Path, attempt: Attempt) -> Path:
    """An update of a million tokens takes 2 s, a quarter of which is communication."""
    (folder / "checkpoints" / "step-00000100").mkdir(parents=True)
    (folder / "config.yaml").write_text("run: {steps: 100}\nprecision: {compute: bf16}\n")
    last = {"step": 100, "loss": 2.0, "tokens": 100_000_000, "tokens_per_second": 5e5, "samples_per_second": 500.0}
    (folder / "metrics.jsonl").write_text(json.dumps({**last, "seconds": 200.0}) + "\n")
    split = {"forward": [0.5] * 8, "backward": [1.0] * 8, "communication": [0.5] * 8}
    interval: dict[str, Any] = {"step": 100, "time": 1.79e9 + 215, "seconds": 200.0, "ranks": list(range(8))}
    interval |= {"updates": [100] * 8, "step_seconds": [2.0] * 8, "slowest": [2.0] * 8, "split": split}
    interval |= {"gauges": {"memory_allocated_peak": [2.0**35] * 8}, "stragglers": []}
    (folder / "ranks.jsonl").write_text(json.dumps(interval) + "\n")
    (folder / "attempts.jsonl").write_text(attempts_text([attempt]))
    return folder


def test_an_update_beside_its_plan_and_the_peak(tmp_path: Path) -> None:
    explanation = explain(write_run(tmp_path / "run", GPU))
    assert explanation.mfu == pytest.approx(5e5 * 6e9 / (8 * 989.5e12))
    text = "\n".join(explanation.sentences)
    assert gives(text, "375TFLOP/s", "37.9 % (MFU)", "990TFLOP/s", "NVIDIA H100")
    assert gives(text, "32.0 GiB", "rank 7", "16.0 GiB", "4.00 GiB weights")
    assert gives(text, "goodput", "93 %", "3 min 35 s")


def test_a_pipeline_waits_by_its_plan(tmp_path: Path) -> None:
    divided = replace(GPU, planned=Planned(2**30, 2**30, 2**31, 0.2))
    text = "\n".join(explain(write_run(tmp_path / "run", divided)).sentences)
    assert gives(text, "pipeline", "20%")


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"peak_flops": None}, "Its MFU isn't known for lack of the peak of NVIDIA H100 80GB HBM3."),
        ({"flops_per_token": None}, "Its MFU isn't known for lack of the operations of its model."),
        ({"device": "cpu", "peak_flops": None}, ""),
    ],
)
def test_no_peak_is_invented(tmp_path: Path, facts: dict[str, Any], words: str) -> None:
    explanation = explain(write_run(tmp_path / "run", replace(GPU, facts={**GPU.facts, **facts})))
    assert explanation.mfu is None
    text = "\n".join(explanation.sentences)
    assert words in text if words else "MFU" not in text


def test_an_update_on_known_gpus_is_set_beside_its_plan(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", replace(GPU, facts={**GPU.facts, "micro_size": 16}))
    config = large(8, data={"train": {"kind": "stdlib-text", "length": 512}})
    (run / "config.yaml").write_text(json.dumps(config.model_dump(mode="json", exclude_unset=True)))
    step = estimator_of(config, 8, None, UserObjects()).step_time(config, parse_cluster("H100:8"))
    plain = run_lockstep("explain", run).stdout
    assert "8 x H100" not in plain, "it takes seconds, and is asked for"
    assert "{" not in plain
    sentences = json.loads(run_lockstep("explain", run, "--gpus", "auto", "--json").stdout)["sentences"]
    assert any(gives(each, "2.00 s", "8 x H100", short_time(step.seconds), "communication") for each in sentences)
    wrong = run_lockstep("explain", run, "--gpus", "H100:4")
    assert wrong.returncode == 2
    assert gives(wrong.stderr, "H100:4", "8 ranks")
    (run / "attempts.jsonl").write_text(attempts_text([GPU, replace(GPU, facts={**GPU.facts, "ranks": 4})]))
    assert "8 x H100" not in run_lockstep("explain", run, "--gpus", "auto").stdout, "its updates differ"
    (run / "attempts.jsonl").write_text(attempts_text([replace(GPU, facts={**GPU.facts, "device": "NVIDIA X1"})]))
    unknown = run_lockstep("explain", run, "--gpus", "auto")
    assert unknown.returncode == 2
    assert gives(unknown.stderr, "NVIDIA X1", "H100:8")


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    for place in (tmp_path, __file__):
        refused = run_lockstep("explain", place)
        assert refused.returncode == 2
        assert gives(refused.stderr, place)
        assert "Traceback" not in refused.stderr
