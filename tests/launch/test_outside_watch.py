"""Ranks that another launcher has started are watched by a process beside them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from kit import small, worlds
from kit.worlds import in_world

import lockstep
from lockstep.launch import outside_watch
from lockstep.launch.memory_folder import ROOT


class Hangs(small.Net):
    """Hangs on rank 1 in its tenth forward, the first time."""

    def __init__(self, once: str) -> None:
        super().__init__()
        self.once, self.left = Path(once), 10

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.left -= self.training
        if self.left == 0 and os.environ["RANK"] == "1" and not self.once.exists():
            self.once.touch()
            while True:
                time.sleep(0.01)
        return super().forward(x)


def _config(folder: Path) -> dict[str, Any]:
    model = {"kind": "custom", "target": f"{__name__}:Hangs", "arguments": {"once": str(folder / "once")}}
    run = {"steps": 14, "folder": str(folder / "run")}
    return {**small.config(run=run, recovery={"watchdog": {"least": 0.5, "end_after": 1.5}}), "model": model}


def _train_watched(folder: str) -> None:
    outside_watch._shared_folder = worlds.SHARED_FOLDER
    lockstep.train(_config(Path(folder)))


def test_a_rank_that_hangs_is_named_and_killed(tmp_path: Path) -> None:
    before = set(ROOT.glob("*-watch-*"))
    with pytest.raises(AssertionError, match=r"rank 1 was ended by SIGKILL|rank 0 raised"):
        in_world(2, _train_watched, str(tmp_path))
    report = (tmp_path / "run/logs/hangs.txt").read_text()
    assert "rank 1 hangs in its forward at" in report
    assert "test_outside_watch.py" in report
    assert "the other rank waits for it" in report
    deadline = time.monotonic() + 20
    while not set(ROOT.glob("*-watch-*")) <= before:
        assert time.monotonic() < deadline, "the process should have ended with the ranks"
        time.sleep(0.05)


@pytest.mark.drill
def test_torchrun_starts_the_ranks_again(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(_config(tmp_path)))
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1", "-m", "lockstep", "train"]
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path[:3], os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [sys.executable, *words, "small.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=200, env=environ
    )
    assert done.returncode == 0, done.stderr
    assert "lockstep: rank 1 hasn't moved for" in done.stderr
    assert "rank 1 hangs in its forward at" in done.stderr
    assert "resumes from step 9" in done.stdout
