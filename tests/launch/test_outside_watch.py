"""Ranks that another launcher has started are watched by a process beside them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from kit import small, worlds
from kit.failures import gives
from kit.waiting import wait_until
from kit.worlds import in_world

import lockstep
from lockstep.config.schema import Launch
from lockstep.config.training_sections import Watchdog
from lockstep.core import heartbeat
from lockstep.core.stopping import STACKS_SIGNAL
from lockstep.distributed.collectives import LocalGroup
from lockstep.distributed.process_group import joined
from lockstep.launch import outside_watch


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


def _watched_as_by_wrappers() -> None:
    """Let this rank be watched, which has a parent of its own, as those that `srun ./wrapper.sh` starts."""
    outside_watch.names_a_rank = worlds.NAMES_A_RANK
    outside_watch.started_by_lockstep = lambda environ: False  # ranks of `worlds` have one parent


def _train_watched(folder: str) -> None:
    _watched_as_by_wrappers()
    lockstep.train(_config(Path(folder)))


def _watches() -> int:
    """The number of processes that watch ranks."""
    lines = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    return sum(outside_watch.__name__.encode() in line for line in lines)


def test_a_rank_that_hangs_is_named_and_killed(tmp_path: Path) -> None:
    before = _watches()
    with pytest.raises(AssertionError, match=r"rank 1 .*SIGKILL|rank 0 raised"):
        in_world(2, _train_watched, str(tmp_path))
    report = (tmp_path / "run/logs/hangs.txt").read_text()
    assert gives(report, "rank 1 hangs", "forward")
    assert "test_outside_watch.py" in report
    wait_until(lambda: _watches() <= before)  # it ends with the ranks


def test_a_process_that_trains_again_opens_nothing_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def open_once() -> int:
        with outside_watch.watched_from_outside(config, None) as watch:
            watch(LocalGroup())
            assert heartbeat.own() is not before
        assert heartbeat.own() is before
        os.kill(os.getpid(), STACKS_SIGNAL)  # of a watch that hasn't noticed that the rank has left
        return len(os.listdir("/proc/self/fd"))

    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, str(int(name.endswith("SIZE"))))
    monkeypatch.setattr(outside_watch, "started_by_lockstep", lambda environ: False)
    monkeypatch.setattr(outside_watch, "_start", lambda *task: None)
    config: Any = SimpleNamespace(recovery=SimpleNamespace(watchdog=Watchdog()))
    before = heartbeat.own()
    assert len({open_once() for _ in range(3)}) == 1


def _started(machines: str) -> list[tuple[list[int], bool]]:
    """Return the ranks that this one has started a watch for, and whether they are alone."""
    started: list[tuple[list[int], bool]] = []
    _watched_as_by_wrappers()
    outside_watch.machine = lambda: machines[int(os.environ["RANK"])]
    outside_watch._start = lambda task, ranks, places: started.append((list(ranks), bool(task["alone"])))
    config: Any = SimpleNamespace(recovery=SimpleNamespace(watchdog=Watchdog()))
    with (
        outside_watch.watched_from_outside(config, None) as watch,
        joined(Launch(device="cpu"), grouped=True) as world,
    ):
        watch(world.axis)
    return started


def test_the_ranks_of_a_host_are_those_that_see_each_other() -> None:
    assert in_world(3, _started, "aba") == [[([0, 2], False)], [([1], False)], []]


@pytest.mark.drill
def test_torchrun_starts_the_ranks_again(tmp_path: Path) -> None:
    (tmp_path / "small.yaml").write_text(yaml.safe_dump(_config(tmp_path)))
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "2", "-m", "lockstep", "train"]
    environ = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(
            [*map(str, Path(__file__).parents[:2]), *sys.path[:3], os.environ.get("PYTHONPATH", "")]
        ),
    }
    done = subprocess.run(
        [sys.executable, *words, "small.yaml"], cwd=tmp_path, capture_output=True, text=True, timeout=200, env=environ
    )
    assert done.returncode == 0, done.stderr
    assert "lockstep: rank 1 hangs" in done.stderr
    assert done.stderr.count("rank 1 hangs in the forward at") == 1
    assert done.stdout.count("resumes from step 9") == 1
