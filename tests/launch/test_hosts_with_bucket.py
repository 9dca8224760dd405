"""Hosts that share no folder, only a bucket: each has a cache of its own, and a run's folder."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit import s3
from kit.commands import Running
from kit.hosts import Network, folder_of, needs_hosts, network
from kit.s3 import BUCKET

from lockstep.stores.s3 import S3Store

pytestmark = needs_hosts
ADDRESS = f"s3://{BUCKET}/hosts"
TRAIN = (
    "train", "digits", "run.epochs=null", "launch.device=cpu", "monitor.every=1", "monitor.tensorboard=false",
    "evaluation.every=null", "evaluation.at_end=false", "checkpoint.every=2", "parallel.strategy=fsdp",
    "checkpoint.retry_seconds=3",
)  # fmt: skip
IN_BUCKET = (f"run.folder={ADDRESS}",)
CHECKPOINTS_IN_BUCKET = ("run.folder=run", f"checkpoint.folder={ADDRESS}/checkpoints")
ENDLESS = "run.steps=100000"
TORCHRUN = (str(Path(sys.executable).with_name("torchrun")), "--nnodes", 2, "--nproc-per-node", 1)


class Hosts:
    """Two hosts that train, and a third one that has the bucket."""

    def __init__(self, net: Network, folder: Path, server: str, endpoint: str) -> None:
        self.net, self.folder = net, folder
        self.server, self.endpoint = server, endpoint

    def start(self, host: int, *words: object) -> Running:
        own = {**s3.environment(self.endpoint), "XDG_CACHE_HOME": str(self.folder / f"cache-{host}")}
        return self.net.start(host, *words, cwd=self.folder, hides=self.folder / "run", LOCKSTEP_JOB_TOKEN="t", **own)

    def train(self, *words: object, leader: int = 0) -> list[Running]:
        """Start `lockstep train` on both; the first in the list leads."""
        place = f"{self.net.address(leader)}:29500"
        common = (*TRAIN, *words, "--ranks", 1, "--nodes", 2, "--rendezvous", place)
        return [self.start(host, *common) for host in (leader, 1 - leader)]

    def torchrun(self, kind: str, *words: object, leader: int = 0) -> list[Running]:
        """Start torchrun on both; the first in the list has rank 0."""
        place = self.net.address(leader)
        launched = []
        for node, host in enumerate((leader, 1 - leader)):
            meeting: tuple[object, ...] = ("--master-addr", place, "--master-port", 29500, "--node-rank", node)
            if kind == "c10d":
                meeting = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{place}:29500", "--rdzv-id", "job",
                           "--rdzv-conf", f"is_host={1 - node}")  # fmt: skip
            launched.append(self.start(host, *TORCHRUN, *meeting, "-m", "lockstep", *TRAIN, *words))
        return launched

    def newest(self) -> int:
        names = S3Store(f"{ADDRESS}/checkpoints").sizes("")
        return max((int(name[5:13]) for name in names if name.endswith("manifest.json")), default=0)

    def kill(self, launched: list[Running]) -> int:
        """Kill all of it after the fourth step; return the newest checkpoint's step."""
        launched[0].wait_for(lambda: self.newest() >= 4)
        for each in launched:
            for rank in each.ranks:  # a launcher's children, some of which have groups of their own
                os.kill(rank, signal.SIGKILL)
            each.send(signal.SIGKILL, group=True)
            each.end()
        return self.newest()


@pytest.fixture
def hosts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hosts]:
    with s3.serving() as server, network(3, tmp_path) as net, s3.proxied(server, net.listener(2)) as proxy:
        for name, value in s3.environment(server).items():
            monkeypatch.setenv(name, value)
        yield Hosts(net, tmp_path, server, proxy.endpoint)


def _steps(metrics: bytes) -> list[int]:
    return [line["step"] for line in map(json.loads, metrics.splitlines()) if "loss" in line]


def _stored(name: str) -> bytes:
    return S3Store(ADDRESS).read_tagged(name)[0]


def test_a_killed_run_in_a_bucket_resumes_with_the_hosts_swapped_and_then_on_one_of_them(hosts: Hosts) -> None:
    before = hosts.kill(hosts.train(ENDLESS, *IN_BUCKET))
    swapped = hosts.train(f"run.steps={before + 4}", *IN_BUCKET, leader=1)
    assert [each.end() for each in swapped] == [0, 0], swapped[0].output + swapped[1].output
    assert f"resumes from step {before:,} " in _stored("logs/rank-0.log").decode()
    assert _steps(_stored("metrics.jsonl")) == [*range(1, before + 5)]
    assert {"logs/rank-0.log", "logs/rank-1.log", "logs/ends.jsonl"} <= S3Store(ADDRESS).sizes("").keys()
    single = hosts.start(0, *TRAIN, *IN_BUCKET, f"run.steps={before + 6}", "--ranks", 1, "parallel.strategy=single")
    assert single.end() == 0, single.output
    assert _steps(_stored("metrics.jsonl")) == [*range(1, before + 7)]


@pytest.mark.drill
def test_hosts_with_only_their_checkpoints_in_a_bucket_resume_on_either(hosts: Hosts) -> None:
    before = hosts.kill(hosts.train(ENDLESS, *CHECKPOINTS_IN_BUCKET))
    again = hosts.train(f"run.steps={before + 4}", *CHECKPOINTS_IN_BUCKET)
    assert [each.end() for each in again] == [0, 0], again[0].output + again[1].output
    run = hosts.folder / "run"
    assert _steps((folder_of(0, run) / "metrics.jsonl").read_bytes()) == [*range(1, before + 5)]


@pytest.mark.drill
@pytest.mark.parametrize(
    ("kind", "words"),
    [("static", IN_BUCKET), ("c10d", IN_BUCKET), ("static", CHECKPOINTS_IN_BUCKET)],  # c10d may move rank 0 elsewhere
    ids=["static run", "c10d run", "static checkpoints"],
)
def test_torchrun_on_hosts_that_share_a_bucket_resumes_a_killed_run(
    hosts: Hosts, kind: str, words: tuple[str, ...]
) -> None:
    before = hosts.kill(hosts.torchrun(kind, ENDLESS, *words))
    leader = 1 if words is IN_BUCKET else 0
    again = hosts.torchrun(kind, f"run.steps={before + 4}", *words, leader=leader)
    assert [each.end() for each in again] == [0, 0], again[0].output + again[1].output
    run = folder_of(0, hosts.folder / "run")
    metrics = _stored("metrics.jsonl") if words is IN_BUCKET else (run / "metrics.jsonl").read_bytes()
    assert _steps(metrics) == [*range(1, before + 5)]
    if words is IN_BUCKET:
        single = hosts.start(0, *TRAIN, *words, f"run.steps={before + 6}", "--ranks", 1, "parallel.strategy=single")
        assert single.end() == 0, single.output
