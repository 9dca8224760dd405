"""Runs on several hosts, which are network namespaces: one launcher on each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kit.commands import run_lockstep
from kit.hosts import needs_hosts, network

RUN = (
    "train",
    "digits",
    "run.steps=12",
    "launch.device=cpu",
    "monitor.every=1",
    "data.train.shift=0",
    "model.dropout=0",
)
TOKEN = {"LOCKSTEP_JOB_TOKEN": "a token that only the hosts know"}


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@needs_hosts
def test_two_hosts_with_two_and_one_rank_train_as_one_process(tmp_path: Path) -> None:
    alone = run_lockstep(*RUN, "--ranks", 1, f"run.folder={tmp_path}/alone", cwd=tmp_path)
    assert alone.returncode == 0, alone.stderr
    with network(2, tmp_path) as net:
        common = (*RUN, "run.folder=run", "--nodes", 2, "--rendezvous", f"{net.address(0)}:29500")
        second = net.start(1, *common, "--node-rank", 1, "--ranks", 1, cwd=tmp_path, **TOKEN)
        first = net.start(0, *common, "--node-rank", 0, "--ranks", 2, cwd=tmp_path, **TOKEN)
        codes = [first.end(), second.end()]
    assert codes == [0, 0], first.output + second.output
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "alone"), rel=2e-6)
    assert "2 hosts: this one, host-0 (ranks 0 and 1), is node 0; the others: host-1 (rank 2)" in first.output
    assert "this one, host-1 (rank 2), is node 1; logs are in" in second.output
    assert sorted(path.name for path in (tmp_path / "run" / "logs").iterdir()) == [f"rank-{n}.log" for n in range(3)]
