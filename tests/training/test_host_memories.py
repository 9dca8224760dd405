"""Which snapshots in the memory of several hosts a run may resume from."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from kit import small

from lockstep.checkpoint.host_parts import COPIES, HostPart, whole_snapshots
from lockstep.config.loading import validate
from lockstep.monitor.attempts import Attempt
from lockstep.training import on_hosts
from lockstep.training.host_memories import attempt_id, validity
from lockstep.training.job import Job

ATTEMPTS = [Attempt(0.0, 1.0), Attempt(0.0, 2.0, step=40), Attempt(0.0, 3.0, step=20)]
IDS = [attempt_id(number, attempt) for number, attempt in enumerate(ATTEMPTS, 1)]


def part(step: int, *ranks: int, attempt: str = IDS[2], place: str = "checkpoints", world: int = 3) -> HostPart:
    return HostPart("run", attempt, step, world, ranks, place)


def steps(*hosts: list[HostPart], run: str = "run") -> list[int]:
    return [snapshot.step for snapshot in whole_snapshots(hosts, run, validity(ATTEMPTS))]


def test_a_snapshot_exists_if_the_hosts_have_all_ranks_of_one_attempt() -> None:
    whole = [part(50, 0), part(50, 1), part(50, 2)]
    assert steps(whole[:1], whole[1:]) == [50]
    assert steps(whole[:1], whole[1:], run="another") == []
    assert steps(whole[:2]) == []
    assert steps(whole[:2], [part(50, 2, attempt=IDS[1])]) == [], "they would be parts of two states"
    assert steps(whole[:2], [part(50, 2, place=COPIES)], [part(40, 0, 1, 2)]) == [50, 40]


def test_what_a_later_attempt_has_left_behind_is_not_resumed_from() -> None:
    for attempt, last in zip(IDS, (20, 20, 1000), strict=True):
        assert steps([part(last, 0, 1, 2, attempt=attempt)]) == [last]
        if last < 1000:
            assert steps([part(last + 1, 0, 1, 2, attempt=attempt)]) == []
    assert steps([part(5, 0, 1, 2, attempt="4-4.000")]) == [], "an attempt that isn't the run's"


def test_the_hosts_of_each_file_are_known() -> None:
    (snapshot,) = whole_snapshots(
        [[part(7, 0, world=2)], [part(7, 1, world=2), part(7, 0, place=COPIES, world=2)]], "run", validity(ATTEMPTS)
    )
    assert snapshot.holders == (((0, "checkpoints"), (1, COPIES)), ((1, "checkpoints"),))


@pytest.mark.parametrize(("saved", "is_named"), [(6, True), (7, False)])
def test_a_host_names_its_part_of_a_snapshot_that_is_newer_than_the_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], saved: int, is_named: bool
) -> None:
    (tmp_path / "checkpoints" / f"step-{saved:08d}").mkdir(parents=True)
    monkeypatch.setattr(on_hosts, "parts_in", lambda folder: [part(7, 0)])
    hosts: Any = Mock(memories=[("host", 1)], world=[0, 1], needs_memory=True)
    with on_hosts._memory_shared(Job(validate(small.config()).config, "small"), tmp_path, hosts) as memory:
        assert memory is not None
    assert memory.exists()
    assert ("the state after step 7 is in the memory of the hosts" in capsys.readouterr().err) is is_named
    monkeypatch.undo()
    left = on_hosts.MemoryFolder.make(tmp_path, hosts=2)
    assert left is not None
    left.remove()
