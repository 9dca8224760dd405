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

from lockstep.stores.buckets import Bucket

pytestmark = needs_hosts
ADDRESS = f"s3://{BUCKET}/hosts"
TRAIN = (
    "train", "digits", "run.epochs=null", "launch.device=cpu", "monitor.every=1", "monitor.tensorboard=false",
    "evaluation.every=null", "evaluation.at_end=false", "checkpoint.every=2", "parallel.strategy=fsdp",
    "checkpoint.retry_seconds=3",
)  # fmt: skip
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

    def torchrun(self, *words: object) -> list[Running]:
        """Start torchrun on both; the first in the list has rank 0."""
        meeting = ("--master-addr", self.net.address(0), "--master-port", 29500)
        train = ("-m", "lockstep", *TRAIN, *words)
        return [self.start(host, *TORCHRUN, *meeting, "--node-rank", host, *train) for host in (0, 1)]

    def newest(self) -> int:
        names = Bucket(f"{ADDRESS}/checkpoints").sizes("")
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


def test_hosts_with_only_their_checkpoints_in_a_bucket_resume_on_either(hosts: Hosts) -> None:
    before = hosts.kill(hosts.train(ENDLESS, *CHECKPOINTS_IN_BUCKET))
    again = hosts.train(f"run.steps={before + 4}", *CHECKPOINTS_IN_BUCKET)
    assert [each.end() for each in again] == [0, 0], again[0].output + again[1].output
    run = hosts.folder / "run"
    assert _steps((folder_of(0, run) / "metrics.jsonl").read_bytes()) == [*range(1, before + 5)]


@pytest.mark.drill
def test_torchrun_on_hosts_that_share_a_bucket_resumes_a_killed_run(hosts: Hosts) -> None:
    before = hosts.kill(hosts.torchrun(ENDLESS, *CHECKPOINTS_IN_BUCKET))
    again = hosts.torchrun(f"run.steps={before + 4}", *CHECKPOINTS_IN_BUCKET)
    assert [each.end() for each in again] == [0, 0], again[0].output + again[1].output
    run = folder_of(0, hosts.folder / "run")
    assert _steps((run / "metrics.jsonl").read_bytes()) == [*range(1, before + 5)]
