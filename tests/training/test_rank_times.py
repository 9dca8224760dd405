"""ranks.jsonl of real runs: an update's phases add up to its time, and the rank that the others wait for is named."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit import small
from kit.worlds import in_world

import lockstep
from lockstep.monitor import rank_meters

STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "zero2": {"strategy": "deepspeed", "deepspeed": {"zero_stage": 2}},
}
SLOW_S = 0.02


class SlowOnOne(small.Net):
    """Computes longer on rank 1."""

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        if dist.is_initialized() and dist.get_rank() == 1:
            time.sleep(SLOW_S)
        return super().forward(points)


def train(folder: Path, name: str, model: str) -> list[dict[str, Any]]:
    config = small.config(
        model,
        run={"steps": 12, "folder": str(folder / name)},
        parallel=STRATEGIES[name],
        monitor={"every": 4, "tensorboard": False, "progress": "plain", "meter_seconds": 0.05},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_meters, "POST_S", 0.0)
        lockstep.train(config)
    path = folder / name / "ranks.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if dist.get_rank() == 0 else []


def train_all(folder: Path, names: list[str]) -> dict[str, list[dict[str, Any]]]:
    with small.in_group():
        return {name: train(folder, name, "SlowOnOne") for name in names}


small.SlowOnOne = SlowOnOne  # type: ignore[attr-defined]  # where configs find models


def test_where_the_time_of_each_rank_goes(tmp_path: Path) -> None:
    of_runs, _ = in_world(2, train_all, tmp_path, ["ddp", "fsdp", "zero2"])
    for name, lines in of_runs.items():
        updates = [sum(line["updates"][rank] for line in lines) for rank in (0, 1)]
        assert updates == [11, 11], name  # all but the first
        for line in lines:
            for rank in range(len(line["ranks"])):
                if line["updates"][rank]:
                    parts = sum(line["split"][phase][rank] for phase in line["split"])
                    assert parts == pytest.approx(line["step_seconds"][rank], rel=0.001), name
        last = lines[-1]
        first_waits, second_waits = last["split"]["communication"]
        assert first_waits > second_waits, name
        assert last["split"]["forward"][1] > SLOW_S > last["split"]["forward"][0], name
        assert last["gauges"]["memory_resident"][0] > 1e7
        assert last["gauges"]["disk_free"][0] > 0
        assert {"cpu_percent", "host_memory_used", "network_sent_rate"} <= set(last["gauges"])
        assert not (tmp_path / name / "live.json").exists()
    gauges = of_runs["ddp"][-1]["gauges"]
    attempt = json.loads((tmp_path / "ddp" / "attempts.jsonl").read_text())
    reduced = 12 * 4 * attempt["trainable"]  # each update, every gradient, in fp32
    assert reduced <= gauges["all_reduce_bytes"][0] == gauges["all_reduce_bytes"][1] < reduced + 12 * 1000  # the votes
    named = [line["stragglers"] for line in of_runs["ddp"] if line["stragglers"]]
    assert named
    assert named[-1][0]["rank"] == 1
    assert named[-1][0]["phase"] == "forward"
