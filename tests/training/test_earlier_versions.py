"""A run folder that an earlier version left: two ranks under fsdp trained `digits` for 4 steps.

Made by `lockstep train digits --ranks 2 --parallel.strategy fsdp --run.folder digits --run.steps 4 --run.epochs null
--checkpoint.every 2 --checkpoint.keep_last 2 --model.width 8 --batch.global_size 32 --batch.micro_size 8
--schedule.kind constant --schedule.warmup_ratio null --precision.compute fp32 --monitor.every 1`. The losses are those
of an undisturbed run of 8 steps on one rank.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from kit.commands import run_lockstep

EARLIER = Path(__file__).parent / "earlier"
VERSIONS = sorted(path.name for path in EARLIER.iterdir())
LOSSES = [
    4.637030601501465,
    3.264575958251953,
    2.6427464485168457,
    2.6991500854492188,
    2.7686803340911865,
    2.5463287830352783,
    2.4308128356933594,
    2.3389081954956055,
]


@pytest.mark.parametrize("version", VERSIONS)
def test_its_run_is_resumed(version: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(EARLIER / version, run)
    for verb in (["ckpt", "verify"], ["ckpt", "audit"], ["eval"], ["report"]):
        done = run_lockstep(*verb, run, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    resumed = run_lockstep("train", run, "--ranks", 1, "--parallel.strategy", "single", "--run.steps", 8, cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "resumes from step 4" in resumed.stdout + resumed.stderr
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["loss"] for line in lines] == pytest.approx(LOSSES, rel=1e-5)
    done = run_lockstep("ckpt", "audit", run, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
