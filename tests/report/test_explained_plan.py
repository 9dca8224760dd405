"""A run beside its plan and the peaks of its devices, from fabricated files; a CPU's peak is measured."""

from __future__ import annotations

import json
import shutil
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.commands import run_lockstep
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from lockstep.config.loading import load
from lockstep.config.recipes import resolve_recipe
from lockstep.config.schema import Loader
from lockstep.core.records import Batch
from lockstep.data.loader import evaluation_batches
from lockstep.measuring.device_peak import operations_of_run, peak_of_run, why_uncounted
from lockstep.models.build import build_model
from lockstep.monitor.attempts import Attempt, Planned, attempts_text
from lockstep.report.explanation import explain
from lockstep.report.roofline import DevicePeak
from lockstep.training.flops import counted_flops
from lockstep.training.sources import open_sources
from lockstep.training.user_objects import UserObjects

GPU = Attempt(
    launched=1.79e9,
    began=1.79e9 + 10,
    hosts=(("a", 8),),
    facts={
        "device": "NVIDIA H100 80GB HBM3", "precision": "bf16", "ranks": 8, "accumulation": 2, "parameters": 10**9,
        "flops_per_token": 6e9, "peak_flops": 989.5e12, "memory_bandwidth": 3.35e12,
    },
    planned=Planned(4 * 2**30, 4 * 2**30, 8 * 2**30, 7e9, 0.0),
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


def test_an_update_beside_the_roofline_and_the_plan(tmp_path: Path) -> None:
    explanation = explain(write_run(tmp_path / "run", GPU))
    roofline = explanation.roofline
    assert roofline is not None
    assert roofline.flops == 6e15
    assert roofline.compute == pytest.approx(6e15 / (8 * 989.5e12))
    assert roofline.mfu == pytest.approx(roofline.compute / 2.0)
    moved = 2 * 2 * 1e9 * 2 + 2 * 16 * 2**30  # weights in bf16 in two micro-batches, then everything twice
    assert roofline.memory == pytest.approx(moved / 3.35e12)
    text = "\n".join(explanation.sentences)
    assert "It computes 375 TFLOP/s on each rank, 37.9 % (MFU) of the 990 TFLOP/s of NVIDIA H100 80GB HBM3" in text
    assert "(data sheet): at the peaks, computation alone would take 758 ms of an update" in text
    assert "gradients and optimizer state 12.6 ms; it takes 2.6 times its bound." in text
    assert "By its plan a rank sends 6.52 GiB in an update; it waited 500 ms for other ranks" in text
    assert "At most 32.0 GiB of the device were used, by rank 7; by its plan 16.0 GiB are 4.00 GiB weights" in text
    assert "Its goodput is 93 %: of 3 min 35 s" in text


def test_a_pipeline_waits_by_its_plan(tmp_path: Path) -> None:
    divided = replace(GPU, planned=Planned(2**30, 2**30, 2**31, None, 0.2))
    explanation = explain(write_run(tmp_path / "run", divided))
    assert explanation.roofline is not None
    assert explanation.roofline.bound == pytest.approx(explanation.roofline.compute / 0.8)
    text = "\n".join(explanation.sentences)
    assert "its pipeline waits 20% by the plan" in text
    assert "By its plan a rank sends" not in text


def on_cpu(host: str) -> Attempt:
    unknown = {"device": "cpu", "precision": "fp32", "peak_flops": None, "memory_bandwidth": None}
    return replace(GPU, hosts=((host, 8),), facts={**GPU.facts, **unknown})


def test_no_peak_is_invented(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", on_cpu("a"))
    explanation = explain(run)
    assert explanation.roofline is not None
    assert explanation.roofline.mfu is None
    text = "\n".join(explanation.sentences)
    assert f"the peak of cpu isn't: `lockstep explain {run} --measure` on a host of the run measures it." in text
    measured = explain(run, peak=DevicePeak(1e15, 1e12))
    assert measured.roofline is not None
    assert measured.roofline.mfu == pytest.approx(0.375)
    assert "(measured now)" in "\n".join(measured.sentences)
    unknown = replace(on_cpu("a"), facts={**on_cpu("a").facts, "flops_per_token": None})
    (run / "attempts.jsonl").write_text(attempts_text([unknown]))
    text = "\n".join(explain(run).sentences)
    assert "the operations of its model aren't counted on a CPU while it trains: `lockstep explain" in text
    counted = explain(run, peak=DevicePeak(1e15, 1e12, flops_per_token=GPU.facts["flops_per_token"]))
    assert counted.roofline is not None
    assert counted.roofline.mfu == pytest.approx(0.375)
    refused = "\n".join(explain(run, peak=DevicePeak(1e15, 1e12, uncounted="it is given")).sentences)
    assert "Its MFU isn't known: the operations of its model can't be counted: it is given." in refused


def test_the_operations_of_a_run_on_a_cpu_are_those_of_a_real_update(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", on_cpu("a"))
    shutil.copy(resolve_recipe("digits").path, run / "config.yaml")
    config = load([run / "config.yaml"]).config
    source, _ = open_sources(config, UserObjects(), None)
    inputs = next(evaluation_batches(source, 4, 0, 1, Loader(), torch.device("cpu"))).inputs
    model = build_model(config.model, source.facts, 0)
    with FlopCounterMode(display=False) as counter:
        (model(*inputs) if isinstance(inputs, tuple) else model(**inputs)).sum().backward()
    assert operations_of_run(run) == counter.get_total_flops() / 4 > 0


def test_the_operations_of_a_model_that_was_handed_over_are_not_known(tmp_path: Path) -> None:
    unknown = replace(on_cpu(socket.gethostname()), facts={**on_cpu("a").facts, "flops_per_token": None})
    run = write_run(tmp_path / "run", unknown)
    (run / "config.yaml").write_text("model: {kind: given}\ndata: {train: {kind: digits}}\nrun: {steps: 1}\n")
    peak = peak_of_run(run)
    assert peak.flops_per_token is None
    assert peak.uncounted == "model.kind of its config was handed over in Python"


class Reading(nn.Module):
    """Does in its forward what can't be done without values."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self._how = nn.Linear(4, 3), how

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        made = self.layer(points)
        if self._how == "value":
            return made / (1.0 + abs(float(made.mean())))
        if self._how == "shape":
            return made + made.nonzero().sum()
        return made + torch.from_numpy(made.detach().numpy())


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("value", "its forward reads the value of a tensor"),
        ("shape", "a shape in its forward depends on the values of a tensor"),
        ("array", "counting them, with tensors that have no values, fails: RuntimeError: .numpy()"),
    ],
)
def test_why_operations_can_not_be_counted_is_stated_in_words(how: str, reason: str) -> None:
    batch = Batch((torch.ones(2, 4),), torch.zeros(2), 2, 2)
    with pytest.raises(RuntimeError) as failed:
        counted_flops(Reading(how), batch)
    assert why_uncounted(failed.value).startswith(reason)


def test_the_peak_is_measured_on_a_host_of_the_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", on_cpu(socket.gethostname()))
    record = json.loads(run_lockstep("explain", run, "--measure", "--json").stdout)
    peak = 6e15 / 8 / record["at_peak_seconds"]
    assert 1e8 < peak < 1e14  # an eighth of this machine
    assert record["at_bandwidth_seconds"] > 0
    assert record["planned"]["sent"] == 7e9
    other = write_run(tmp_path / "other", on_cpu("elsewhere"))
    refused = run_lockstep("explain", other, "--measure")
    assert refused.returncode == 1
    assert "the run was on elsewhere" in refused.stderr


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    for place in (tmp_path, __file__):
        refused = run_lockstep("explain", place)
        assert refused.returncode == 2
        assert "is not the folder of a run" in refused.stderr
        assert "Traceback" not in refused.stderr
