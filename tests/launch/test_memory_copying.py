"""Copies of the newest part of a snapshot in another host's memory: which are made, and which stay."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from lockstep.checkpoint.host_parts import COPIES, OWN, PART, HostPart, parts_in, whole_snapshots
from lockstep.checkpoint.manifest import shard_file
from lockstep.checkpoint.storage import MANIFEST
from lockstep.launch.memory_copying import MemoryCopier
from lockstep.launch.memory_serving import RemoteMemory

Hosts = dict[str, Path]


class NearMemory:
    """A host's memory, as another host sees it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def parts(self) -> list[HostPart]:
        return parts_in(self._folder)

    def open(self, place: str, name: str) -> int:
        self._data = (self._folder / place / name).read_bytes()
        return len(self._data)

    def read(self, offset: int, into: memoryview) -> None:
        into[:] = self._data[offset : offset + len(into)]


def write(folder: Path, place: str, step: int, rank: int, attempt: int = 1, world: int = 3) -> None:
    part = HostPart("run", f"{attempt}-0.000", step, world, (rank,), place)
    path = folder / place / part.name
    path.mkdir(parents=True)
    for name in (MANIFEST, shard_file(rank)):
        (path / name).write_text(name)
    (path / PART).write_bytes(part.encoded())


def copy(to: Path, source: Path) -> None:
    copier = MemoryCopier(to, ("10.0.0.1", 1), b"key", print)
    copier._copy_newest(cast(RemoteMemory, NearMemory(source)))


def whole(*hosts: Path) -> list[int]:
    return [snapshot.step for snapshot in whole_snapshots([parts_in(host) for host in hosts], "run", lambda part: True)]


def copies(folder: Path) -> list[tuple[tuple[int, int], int]]:
    return [(part.order, *part.ranks) for part in parts_in(folder) if part.place == COPIES]


@pytest.fixture
def hosts(tmp_path: Path) -> Hosts:
    """Three hosts with a rank each, and two snapshots: a has copies of c's parts, b of a's, c of b's."""
    made = {name: tmp_path / name for name in "abc"}
    for rank, folder in enumerate(made.values()):
        for step in (400, 470):
            write(folder, OWN, step, rank)
            write(folder, COPIES, step, (rank - 1) % 3)
    return made


def test_the_copies_of_a_lost_hosts_parts_stay_until_there_is_a_later_snapshot(hosts: Hosts) -> None:
    """Host b is lost: a and c are the ring, so c's copies of b's parts are the only ones."""
    a, c = hosts["a"], hosts["c"]
    for to, source in ((c, a), (a, c)):
        copy(to, source)
    assert whole(a, c) == [470, 400]
    write(a, OWN, 500, 0, attempt=2, world=2)
    copy(c, a)
    assert copies(c) == [((1, 470), 1), ((2, 500), 0)]
    assert 470 in whole(a, c), "host c's part of the next one isn't copied yet"


def test_a_copy_that_fails_costs_no_copy_that_the_run_may_need(hosts: Hosts) -> None:
    a, c = hosts["a"], hosts["c"]
    write(a, OWN, 500, 0)
    (a / OWN / "step-00000500" / shard_file(0)).unlink()
    with pytest.raises(OSError, match="No such file"):
        copy(c, a)
    assert 470 in whole(a, c)


def test_parts_of_a_later_attempt_replace_those_that_the_run_has_left_behind(hosts: Hosts) -> None:
    """The run has resumed from step 400; a part of step 470 was copied while ranks removed their parts after it."""
    a, b = hosts["a"], hosts["b"]
    write(a, OWN, 430, 0, attempt=2)
    copy(b, a)
    assert ((2, 430), 0) in copies(b)
    (a / OWN / "step-00000470").rename(a / "removed")
    write(a, OWN, 470, 0, attempt=2)
    copy(b, a)
    assert copies(b) == [((2, 430), 0), ((2, 470), 0)]
