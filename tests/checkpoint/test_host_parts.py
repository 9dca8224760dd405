"""Which snapshots in the memory of several hosts a run may resume from."""

from __future__ import annotations

from pathlib import Path

from lockstep.checkpoint import hashing
from lockstep.checkpoint.local import LocalStorage
from lockstep.checkpoint.manifest import shard_file, with_files
from lockstep.checkpoint.memory_saving import HostPart, files_of_whole, parts_in
from lockstep.checkpoint.storage import MANIFEST, checkpoint_name
from lockstep.monitor.attempts import Attempt, attempt_id, last_steps

ATTEMPTS = [Attempt(0.0, 1.0), Attempt(0.0, 2.0, step=40), Attempt(0.0, 3.0, step=20)]
IDS = [attempt_id(number, attempt) for number, attempt in enumerate(ATTEMPTS, 1)]


def part(step: int, *ranks: int, attempt: str = IDS[2], world: int = 3) -> HostPart:
    return HostPart("run", attempt, step, world, {shard_file(rank): rank for rank in ranks})


def steps(*hosts: list[HostPart], run: str = "run") -> list[int]:
    last = last_steps(ATTEMPTS)
    return sorted(files_of_whole(hosts, run, lambda attempt, step: step <= last.get(attempt, -1)))


def test_a_snapshot_is_whole_if_each_host_has_its_part_of_one_attempt() -> None:
    assert steps([part(50, 0, 1)], [part(50, 2)]) == [50]
    assert steps([part(50, 0, 1)], [part(50, 2)], run="another") == []
    assert steps([part(50, 0, 1)], []) == [], "a lost host has taken its part with it"
    assert steps([part(50, 0, 1)], [part(50, 2, attempt=IDS[1])]) == [], "they would be parts of two states"
    assert steps([part(40, 0, 1), part(50, 0, 1)], [part(50, 2), part(40, 2), part(30, 2)]) == [40, 50]
    assert steps([part(50, 0, 1, world=4)], [part(50, 2, world=4)]) == [], "a rank was on a host that has left"


def test_what_a_later_attempt_has_left_behind_is_not_resumed_from() -> None:
    for attempt, last in zip(IDS, (20, 20, 1000), strict=True):
        assert steps([part(last, 0, 1, 2, attempt=attempt)]) == [last]
        if last < 1000:
            assert steps([part(last + 1, 0, 1, 2, attempt=attempt)]) == []
    assert steps([part(5, 0, 1, 2, attempt="4-4.000")]) == [], "an attempt that isn't the run's"


def test_a_host_has_a_part_if_the_files_are_those_of_its_ranks(tmp_path: Path) -> None:
    memory = LocalStorage(tmp_path, "run")
    body = '{"environment":{"attempt":"1-1.000"},"files":{},"ranks":2,"run":"run","step":7}'
    folder = tmp_path / checkpoint_name(7)
    folder.mkdir()
    (folder / MANIFEST).write_bytes(with_files(hashed(body), {shard_file(1): {"size": 3}}))
    assert parts_in(memory, range(1)) == []
    (found,) = parts_in(memory, range(1, 2))
    assert (found.run, found.attempt, found.step, found.ranks) == ("run", "1-1.000", 7, 2)
    (folder / MANIFEST).write_bytes(b"torn")
    assert parts_in(memory, range(1, 2)) == []


def hashed(body: str) -> bytes:
    return f'{{"manifest":{body},"xxh3_128":"{hashing.hash_bytes(body.encode())}"}}\n'.encode()
