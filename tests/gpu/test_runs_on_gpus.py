"""A user's runs on a GPU: from the command line, cut and resumed, over to the CPU and back, out of memory, stopped."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
from gpu.on_gpus import group, on_one_gpu
from kit.commands import run_lockstep, start_lockstep
from kit.layouts import asking_for
from training.test_resume import STEPS, _digits

import lockstep
from lockstep.checkpoint.local import LocalStorage
from lockstep.loop.session import components_of
from lockstep.resuming.checkpoints import Checkpoints
from lockstep.resuming.resuming import Resume

Outcome = tuple[dict[int, float], dict[str, bytes]]

LAYOUTS = ["single", "ddp", "fsdp", "zero1", "zero3"]
CUTS = (2, 7)


def cut_and_uncut(configs: list[dict[str, Any]], folder: str) -> list[list[Outcome]]:
    """Of each config: the uninterrupted run, and those interrupted at each of the cuts."""
    with group():
        return [
            [_run(config, Path(folder, str(number)), cut) for cut in (None, *reversed(CUTS))]
            for number, config in enumerate(configs)
        ]


def _run(config: dict[str, Any], folder: Path, cut: int | None) -> Outcome:
    """Losses by step, and the weights' bytes at the end; without a cut from the beginning, saving at all of them."""
    with lockstep.session(config) as session:
        checkpoints = Checkpoints(session, LocalStorage(folder), {})
        checkpoints.begin(Resume(step=cut))
        losses = {}
        for report in session:
            losses[report.step] = report.loss
            if cut is None and session.progress.steps in CUTS:  # a GPU's reports come an update late
                checkpoints.save()
        assert all(ended.failure is None for ended in checkpoints.finish())
        weights = components_of(session).sharding.state.weights()
        return losses, {name: value.cpu().numpy().tobytes() for name, value in weights}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_cut_runs_end_as_uncut_ones(tmp_path: Path, layout: str) -> None:
    configs = []
    for compute in ("fp32", "bf16", "fp16"):
        config = {**_digits(2, 1, 2, compute, 1), "launch": {"device": "cuda"}, "parallel": asking_for(layout, 1)}
        configs.append({**config, "run": {"steps": STEPS, "determinism": "deterministic"}})
    for uncut, *cuts in on_one_gpu(cut_and_uncut, configs, str(tmp_path)):
        for cut, (losses, weights) in zip(reversed(CUTS), cuts, strict=True):
            assert losses == {step: loss for step, loss in uncut[0].items() if step > cut}
            assert [name for name, value in weights.items() if value != uncut[1][name]] == []


def metrics(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def test_from_gpu_to_cpu_and_back(tmp_path: Path) -> None:
    """Losses continue where they were, on another processor and under another strategy."""
    small = [
        "stdlib-lm",
        "--monitor.every=1",
        "--precision.compute=fp32",
        "--schedule.kind=constant",
        "--schedule.warmup_ratio=null",
        "--run.steps=12",
    ]
    whole = run_lockstep("train", *small, "--run.folder=whole", "--launch.device=cuda", cwd=tmp_path)
    assert whole.returncode == 0, whole.stderr
    cut = ["--run.folder=cut", "--checkpoint.every=4"]
    for steps, device, strategy in ((4, "cuda", "fsdp"), (8, "cpu", "single"), (12, "cuda", "ddp")):
        words = [*small[:-1], f"--run.steps={steps}", *cut, f"--launch.device={device}"]
        part = run_lockstep("train", *words, f"--parallel.strategy={strategy}", "--launch.ranks=1", cwd=tmp_path)
        assert part.returncode == 0, part.stderr
    expected, losses = metrics(tmp_path / "whole"), metrics(tmp_path / "cut")
    assert losses == pytest.approx(expected, rel=1e-3)


def test_a_stopped_run_saves_and_goes_on(tmp_path: Path) -> None:
    words = ["train", "stdlib-lm", "--monitor.every=1", "--run.steps=3000", "--run.folder=run", "--launch.ranks=1"]
    running = start_lockstep(*words, cwd=tmp_path)
    running.wait_for(lambda: (tmp_path / "run" / "metrics.jsonl").exists() and len(metrics(tmp_path / "run")) > 20)
    running.send(signal.SIGTERM)
    assert running.end() in (75, 143, 130), running.output
    steps = max(metrics(tmp_path / "run"))
    again = run_lockstep(*words, f"--run.steps={steps + 5}", cwd=tmp_path)
    assert again.returncode == 0, again.stderr
    assert json.loads((tmp_path / "run" / "environment.json").read_text())


def test_plan_speaks_of_the_gpu(tmp_path: Path) -> None:
    done = run_lockstep("plan", "stdlib-lm", "--ranks", "1", "--measure", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    page = json.loads(done.stdout)
    assert page["measured_peak_bytes"] == pytest.approx(page["predicted_peak_bytes"], rel=0.02)
