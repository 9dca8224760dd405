"""Traces of real runs: which updates they have, that they add up, and that training doesn't notice."""

from __future__ import annotations

import gzip
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit import small
from kit.commands import run_lockstep
from kit.failures import gives
from kit.worlds import in_process, in_world

import lockstep
from lockstep.config.training_sections import ProfileConfig
from lockstep.core.errors import ConfigError
from lockstep.monitor.trace_requests import REQUEST


class Slow(small.Net):
    """Computes for 20 ms."""

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        time.sleep(0.02)
        return super().forward(points)


small.Slow = Slow  # type: ignore[attr-defined]  # where configs find models


def config(folder: Path, model: str = "Net", steps: int = 8, **sections: Any) -> dict[str, Any]:
    quiet = {"every": 1, "tensorboard": False, "progress": "none"}
    return small.config(model, run={"steps": steps, "folder": str(folder)}, monitor=quiet, **sections)


def trace_of(path: Path) -> dict[str, Any]:
    return dict(json.loads(gzip.decompress(path.read_bytes())))


def results(run: Path) -> tuple[list[tuple[float, float]], bytes]:
    """Losses and norms of each update, and the weights."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    weights = run / "model" / "model.safetensors"
    return [(line["loss"], line["grad_norm"]) for line in lines], weights.read_bytes()


def train_with_and_without(folder: Path) -> None:
    parallel = {"strategy": "ddp"}
    profile = {"steps": "6..7", "warmup": 0, "ranks": "all", "stacks": True, "flops": True}
    with small.in_group():
        lockstep.train(config(folder / "plain", "Slow", parallel=parallel))
        lockstep.train(config(folder / "traced", "Slow", parallel=parallel, profile=profile))


def test_traces_of_two_ranks(tmp_path: Path) -> None:
    in_world(2, train_with_and_without, tmp_path)
    assert results(tmp_path / "plain") == results(tmp_path / "traced")
    names = sorted(path.name for path in (tmp_path / "traced" / "profile").iterdir())
    assert names == [f"rank{rank}.6.pt.trace.json.gz" for rank in (0, 1)]
    assert not (tmp_path / "plain" / "profile").exists()
    trace = trace_of(tmp_path / "traced" / "profile" / names[-1])
    facts = trace["lockstep"]
    assert (facts["rank"], facts["ranks"], facts["first"], facts["last"]) == (1, 2, 6, 7)
    events = trace["traceEvents"]
    updates = [event for event in events if event["name"].startswith("lockstep/update")]
    assert [event["args"]["update"] for event in updates] == [6, 7]
    phases = [event for event in events if event.get("cat") == "lockstep" and event not in updates]
    whole = sum(event["dur"] for event in updates)
    assert sum(event["dur"] for event in phases) == pytest.approx(whole, rel=1e-6)
    assert sum(event["dur"] for event in phases if event["name"] == "lockstep/forward") > 2 * 20_000

    def inside(operator: str, phase: str) -> bool:  # by two clocks: torch's and Lockstep's
        ranges = [(e["ts"], e["ts"] + e["dur"]) for e in phases if e["name"] == f"lockstep/{phase}"]
        operators = [event for event in events if event["name"] == operator]
        assert operators, operator
        return all(any(begin <= e["ts"] <= end for begin, end in ranges) for e in operators)

    assert inside("aten::tanh", "forward")
    assert inside("TanhBackward0", "backward")
    assert inside("aten::_fused_adamw_", "optimizer")


def train_on_request(folder: Path) -> None:
    def ask() -> None:
        while not (folder / "live.json").exists():
            time.sleep(0.02)
        (folder / "profile").mkdir()
        request = ProfileConfig(steps="1..2", ranks=(1,)).model_dump_json()
        (folder / "profile" / REQUEST).write_bytes(request.encode())

    with small.in_group():
        if dist.get_rank() == 0:
            threading.Thread(target=ask, daemon=True).start()
        lockstep.train(config(folder, "Slow", steps=200, parallel={"strategy": "ddp"}))


def test_a_running_job_is_asked_for_a_trace(tmp_path: Path) -> None:
    in_world(2, train_on_request, tmp_path / "run")
    (path,) = (tmp_path / "run" / "profile").glob("*.gz")
    assert path.name.startswith("rank1.")
    assert not (tmp_path / "run" / "profile" / REQUEST).exists()


def refused(folder: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        lockstep.train(config(folder, profile={"steps": 2, "ranks": [3]}))
    return str(caught.value)


def test_a_rank_that_does_not_exist(tmp_path: Path) -> None:
    assert "rank 3 doesn't exist" in in_process(refused, tmp_path / "run")


def test_a_trace_that_the_run_never_reaches_is_announced(tmp_path: Path) -> None:
    done = run_lockstep("train", "digits", "run.steps=2", "profile.steps=9..10", cwd=tmp_path)
    assert gives(done.stdout, "update 9", 2)
