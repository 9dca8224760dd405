"""Runs on several hosts that lose ranks and hosts, and continue: on loopback, where each launcher is a host."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path

import pytest
from kit.commands import Running, run_lockstep, start_lockstep
from kit.worlds import free_port

from lockstep.checkpoint.comparison import OpenCheckpoint, compare
from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.reading import read_manifest
from lockstep.loop.ledger import audit
from lockstep.resilience.faults import Fault, events_of, write_plan
from lockstep.resuming.locations import choose, find

STEPS = 40
RUN = (
    "train", "digits", f"run.steps={STEPS}", "launch.device=cpu", "monitor.every=1", "precision.compute=fp32",
    "evaluation.at_end=false", "checkpoint.every=8", "launch.timeout=60", "--ranks", 1,
    "model.layers=1", "model.width=8", "monitor.tensorboard=false",
)  # fmt: skip
SLOW = f"{Path(__file__).with_name('slow_images.py')}:SlowImages"


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same run with both ranks on one host, in which nothing fails."""
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    done = run_lockstep(*RUN, "--ranks", 2, f"run.folder={run}", cwd=run.parent)
    assert done.returncode == 0, done.stderr
    return run


class Cluster:
    """Launchers on loopback, each with a rank, that train one run."""

    def __init__(self, folder: Path, nodes: int | str, *words: object) -> None:
        self.run = folder / "run"
        self._folder = folder
        self._started = 0
        self._words = (
            *RUN,
            f"run.folder={self.run}",
            "--nodes",
            nodes,
            "--rendezvous",
            f"127.0.0.1:{free_port()}",
            *words,
        )

    def start(self, node: int) -> Running:
        self._started += 1
        folder = self._folder / f"launcher-{self._started}"
        folder.mkdir()
        return start_lockstep(*self._words, "--node-rank", node, cwd=folder)

    def steps(self) -> list[int]:
        path = self.run / "metrics.jsonl"
        return [json.loads(line)["step"] for line in path.read_text().splitlines()] if path.exists() else []

    def has_trained(self, step: int) -> bool:
        return max(self.steps(), default=0) >= step


def newest(run: Path) -> Manifest:
    place = find(run)
    return read_manifest(place.storage, choose(place, None))


def assert_equal(run: Path, undisturbed: Path) -> None:
    places = [find(path) for path in (run, undisturbed)]
    first, second = (OpenCheckpoint(place.storage, choose(place, None)) for place in places)
    found = compare(first, second)
    assert found.same > 0
    assert not any((found.alone[0], found.alone[1], found.kinds, found.values, found.state)), found
    expected = losses(undisturbed)
    assert all(loss == expected[step] for step, loss in losses(run).items())
    manifest = newest(run)
    assert audit(manifest.state, manifest.samples).complete


def losses(run: Path) -> Mapping[int, float]:
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines}


def planted(kind: str, folder: Path, rank: int, step: int) -> str:
    write_plan(folder / "plan.json", [Fault(kind, rank, step, "backward")])
    return f"launch.environment.LOCKSTEP_FAULTS={folder / 'plan.json'}"


def kill_host(launcher: Running, folder: Path) -> None:
    """Kill a launcher once its rank hangs, as planted."""
    launcher.wait_for(lambda: any(event["event"] == "fired" for event in events_of(folder / "plan.json")))
    launcher.send(signal.SIGKILL)
    assert launcher.end() == -signal.SIGKILL


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_starts_again_on_all_hosts(tmp_path: Path, undisturbed: Path, rank: int) -> None:
    cluster = Cluster(tmp_path, 2, planted("kill", tmp_path, rank, 21))
    launched = [cluster.start(node) for node in (1, 0)]
    assert [launcher.end() for launcher in launched] == [0, 0], launched[0].output + launched[1].output
    assert "lockstep: round 2 trains on 2 hosts" in launched[0].output
    assert "lockstep: round 2 trains on 2 hosts" in launched[1].output
    assert [event["event"] for event in events_of(tmp_path / "plan.json")].count("fired") == 1
    assert_equal(cluster.run, undisturbed)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_that_is_lost_is_waited_for(tmp_path: Path, undisturbed: Path, lost: int) -> None:
    """Its launcher is killed, and started again as a scheduler does."""
    cluster = Cluster(tmp_path, 2, planted("hang", tmp_path, lost, 21))
    launched = [cluster.start(node) for node in (0, 1)]
    kill_host(launched[lost], tmp_path)
    other = launched[1 - lost]
    waits = "this host waits up to 120 s (recovery.host_wait)" if lost == 0 else "from the newest state"
    other.wait_for(lambda: waits in other.output)
    again = cluster.start(lost)
    assert [again.end(), other.end()] == [0, 0], again.output + other.output
    assert_equal(cluster.run, undisturbed)


def test_a_run_continues_with_fewer_hosts_and_takes_in_one_that_returns(tmp_path: Path) -> None:
    slow = (
        "data.train.kind=custom",
        f"data.train.target={SLOW}",
        "model.classes=10",
        "run.determinism=invariant",
        "batch.micro_size=16",
    )
    alone = start_lockstep(*RUN, *slow, f"run.folder={tmp_path / 'alone'}", cwd=tmp_path)
    cluster = Cluster(tmp_path, "1:2", *slow, planted("hang", tmp_path, 1, 10))
    launched = [cluster.start(node) for node in (0, 1)]
    kill_host(launched[1], tmp_path)
    launched[0].wait_for(lambda: "round 2 trains on 1 host" in launched[0].output)
    launched[0].wait_for(lambda: cluster.has_trained(14))
    again = cluster.start(1)
    assert [launched[0].end(), again.end()] == [0, 0], launched[0].output + again.output
    assert "round 3 trains on 2 hosts" in launched[0].output
    assert alone.end() == 0, alone.output
    assert_equal(cluster.run, tmp_path / "alone")
