"""Snapshots in the memory of several hosts: on loopback, where each launcher is a host with a memory of its own."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from kit.commands import run_lockstep
from kit.waiting import wait_until
from test_host_rounds import RUN, SLOW, Cluster, assert_equal, kill_host, planted

from lockstep.launch.memory_folder import MemoryFolder

EVERY = 4
FAILS = 21
WORDS = (
    "checkpoint.every=1000", f"recovery.snapshot_every={EVERY}", "parallel.strategy=fsdp", "data.train.kind=custom",
    f"data.train.target={SLOW}", "model.classes=10",
)  # fmt: skip


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("undisturbed") / "run"
    done = run_lockstep(*RUN, *WORDS, "--ranks", 2, f"run.folder={run}", cwd=run.parent)
    assert done.returncode == 0, done.stderr
    return run


def resumed_from(run: Path) -> list[int]:
    log = (run / "logs" / "rank-0.log").read_text()
    return [int(step) for step in re.findall(r"resumes from step (\d+) .*which was in memory", log)]


def empty_memory(run: Path, hosts: int) -> None:
    """Lose what the launcher that was killed has left, as a host that starts again does."""
    folders: list[MemoryFolder] = []

    def is_left() -> bool:  # its ranks, which end with it, have the lock, too
        if (folder := MemoryFolder.make(run, hosts=hosts)) is not None:
            folders.append(folder)
        return bool(folders)

    wait_until(is_left)
    (memory,) = folders
    assert list(memory.path.glob("checkpoints/step-*"))
    memory.remove()


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.drill), 1])
def test_a_rank_that_is_killed_costs_the_updates_since_the_last_snapshot(
    tmp_path: Path, undisturbed: Path, rank: int
) -> None:
    cluster = Cluster(tmp_path, 2, planted("kill", tmp_path, rank, FAILS), *WORDS)
    launched = [cluster.start(node) for node in (1, 0)]
    assert [launcher.end() for launcher in launched] == [0, 0], launched[0].output + launched[1].output
    (step,) = resumed_from(cluster.run)
    assert FAILS - 2 * EVERY <= step < FAILS
    assert_equal(cluster.run, undisturbed)
    steps = cluster.steps()
    assert steps == [*range(1, len(steps) + 1)], "metrics.jsonl has each update once"


@pytest.mark.drill
@pytest.mark.parametrize("lost", [0, 1])
def test_a_host_that_has_lost_its_memory_resumes_with_the_others_from_the_newest_checkpoint(
    tmp_path: Path, undisturbed: Path, lost: int
) -> None:
    cluster = Cluster(tmp_path, 2, planted("hang", tmp_path, lost, FAILS), *WORDS, "checkpoint.every=8")
    launched = [cluster.start(node) for node in (0, 1)]
    kill_host(launched[lost], tmp_path)
    empty_memory(cluster.run, 2)
    again = cluster.start(lost)
    assert [again.end(), launched[1 - lost].end()] == [0, 0], again.output + launched[1 - lost].output
    assert resumed_from(cluster.run) == []
    assert_equal(cluster.run, undisturbed)


@pytest.mark.drill
def test_hosts_that_do_not_find_node_0_again_leave_their_parts_to_the_next_start(
    tmp_path: Path, undisturbed: Path
) -> None:
    cluster = Cluster(tmp_path, 2, planted("hang", tmp_path, 0, FAILS), *WORDS, "recovery.host_wait=1")
    launched = [cluster.start(node) for node in (0, 1)]
    kill_host(launched[0], tmp_path)
    assert launched[1].end() == 1, launched[1].output
    assert re.search(r"the state after step \d+ is in the memory of the hosts, this one's part in ", launched[1].output)
    again = [cluster.start(node) for node in (0, 1)]
    assert [each.end() for each in again] == [0, 0], again[0].output + again[1].output
    (step,) = resumed_from(cluster.run)
    assert 0 < step < FAILS
    assert_equal(cluster.run, undisturbed)
