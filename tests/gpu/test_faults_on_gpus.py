"""On a GPU a run recovers from the faults that it recovers from on a CPU, and from those that only a GPU has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from kit.commands import Done, run_lockstep
from torch import Tensor, nn

from lockstep.monitor.attempts import read_attempts

LAYOUTS = {
    "single": ["--parallel.strategy=single"],
    "ddp": ["--parallel.strategy=ddp"],
    "fsdp": ["--parallel.strategy=fsdp"],
    "zero2": ["--parallel.strategy=deepspeed", "--parallel.deepspeed.zero_stage=2"],
    "zero3": ["--parallel.strategy=deepspeed", "--parallel.deepspeed.zero_stage=3"],
}
SMALL = (
    "stdlib-lm", "--model.layers=4", "--model.width=64", "--model.heads=2", "--data.train.length=64",
    "--data.evaluation.held-out.length=64", "--data.evaluation.held-out.samples=16", "--evaluation.prompt=null",
    "--evaluation.every=null", "--batch.global_size=8", "--launch.device=cuda", "--ranks=1",
)  # fmt: skip
MEMORY_BYTES = 4 << 30
WIDTH = 4096


class Crowded(nn.Module):
    """On a GPU of which it has four gibibytes, sixteen samples need about six."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        if torch.cuda.is_available() and torch.cuda.get_per_process_memory_fraction() == 1:
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(MEMORY_BYTES / total)

    def forward(self, points: Tensor) -> Tensor:
        wide = points.repeat(WIDTH, WIDTH // 4)
        for block in self.blocks:
            wide = torch.tanh(block(wide))
        return wide[: len(points), :3]


class Stuck(nn.Module):
    """Its fourth forward starts a kernel that computes for a minute, if a file doesn't exist yet."""

    def __init__(self, seen: str) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.seen, self.calls = Path(seen), 0

    def forward(self, points: Tensor) -> Tensor:
        self.calls += 1
        if self.calls == 4 and not self.seen.exists():
            self.seen.touch()
            torch.cuda._sleep(100_000_000_000)
        return self.layer(points)


def config(folder: Path, name: str, arguments: dict[str, Any] | None = None, **sections: Any) -> Path:
    asked = {
        "model": {"kind": "custom", "target": f"{__file__}:{name}", "arguments": arguments or {}},
        "objective": {"kind": "classification"},
        "data": {"train": {"kind": "custom", "target": "kit.small:points"}},
        "batch": {"global_size": 32, "micro_size": 16},
        "precision": {"compute": "fp32", "tf32": False},
        "run": {"steps": 4, "folder": str(folder / "run"), "determinism": "deterministic"},
        "monitor": {"every": 1, "tensorboard": False},
        "launch": {"device": "cuda"},
    }
    file = folder / "run.yaml"
    file.write_text(yaml.safe_dump({**asked, **sections}))
    return file


def losses(run: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def trained(file: Path, *words: str, **environment: str) -> Done:
    done = run_lockstep("train", file, *words, **environment)
    assert "Traceback" not in done.stdout + done.stderr
    return done


@pytest.mark.parametrize("kinds", ["kill,exit,raise,oom", "stop,hang,gil,nan", "sample,flip,full,gone,slow"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_fault(tmp_path: Path, layout: str, kinds: str) -> None:
    """Bitwise the undisturbed run."""
    words = [*SMALL, *LAYOUTS[layout], f"--faults={kinds}", f"--rounds={len(kinds.split(','))}", "--json"]
    done = run_lockstep("chaos", *words, "--run.determinism=deterministic", "--folder", tmp_path / "runs")
    rows = {row["fault"]: row for row in json.loads(done.stdout or "[]")}
    print(layout, {name: row["recovery_seconds"] for name, row in rows.items()})
    assert {name: row["failure"] for name, row in rows.items() if not row["passed"]} == {}, done.stderr
    assert set(rows) == set(kinds.split(",")), done.stderr


def test_memory_that_runs_out_halves_micro_batches(tmp_path: Path) -> None:
    file = config(tmp_path, "Crowded")
    done = trained(file)
    assert done.returncode == 0, done.stderr
    assert "instead of 16 from here on" in done.stderr
    size = read_attempts(tmp_path / "run")[-1].number("micro_size")
    assert size in (2, 4, 8)
    words = (f"--batch.micro_size={size}", f"--run.folder={tmp_path / 'smaller'}")
    assert trained(file, *words).returncode == 0
    assert losses(tmp_path / "run") == losses(tmp_path / "smaller")


def test_the_largest_micro_batch_that_fits_is_found(tmp_path: Path) -> None:
    file = config(tmp_path, "Crowded", batch={"global_size": 32, "micro_size": "auto"})
    done = trained(file, PYTORCH_ALLOC_CONF="per_process_memory_fraction:0.05")
    assert done.returncode == 0, done.stderr
    assert "from here on" not in done.stderr
    (attempt,) = read_attempts(tmp_path / "run")
    assert 1 < (attempt.number("micro_size") or 0) < 32


def test_memory_that_runs_out_is_a_sentence_where_nothing_is_tried_again(tmp_path: Path) -> None:
    done = trained(config(tmp_path, "Crowded", recovery={"restarts": 0}))
    assert done.returncode == 1
    (line,) = [line for line in done.stderr.splitlines() if "out of memory" in line]
    assert "batch.micro_size" in line


def test_a_kernel_that_does_not_end_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    seen = {"seen": str(tmp_path / "seen")}
    done = trained(config(tmp_path, "Stuck", seen, recovery={"watchdog": {"end_after": 5}}))
    assert done.returncode == 0, done.stderr
    assert "rank 0" in done.stderr
    assert sorted(losses(tmp_path / "run")) == [1, 2, 3, 4]
    print(done.stderr)
