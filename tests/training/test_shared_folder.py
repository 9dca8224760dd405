"""A folder that all hosts share may be seen late: a network file system remembers for a while that it didn't exist."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from kit.failures import fails

from lockstep.core.errors import ConfigError
from lockstep.core.files import exists_anew
from lockstep.resuming import resuming


class Remembering:
    """A folder whose client remembers a number of look-ups long that a name doesn't exist."""

    place = "/shared/checkpoints"

    def __init__(self, looks: int) -> None:
        self.looks = looks

    def has_marker(self, token: str) -> bool:
        self.looks -= 1
        return self.looks < 0

    @contextlib.contextmanager
    def try_lock(self, name: str) -> Iterator[bool]:
        yield True


class SecondRank:
    """Rank 1 of 2."""

    size, rank = 2, 1

    def broadcast(self, value: object) -> object:
        return value

    def barrier(self) -> None:
        pass

    def gather(self, value: object) -> list[object]:
        return [True, value]


def _begin(looks: int, timeout: float = 600.0) -> None:
    resuming.refuse_local_storage(cast("Any", Remembering(looks)), cast("Any", SecondRank()), timeout)


def test_a_folder_that_is_seen_late_is_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, a fresh run over several nodes was refused."""
    _begin(looks=5)


def test_a_folder_of_another_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resuming, "_CACHED", 0.02)
    with fails(ConfigError, "ranks 1", "rank 0", "/shared/checkpoints"):
        _begin(looks=10**9)
    monkeypatch.setattr(resuming, "_CACHED", 60.0)
    with pytest.raises(ConfigError, match="don't see"):  # the others wait in a collective, whose time is limited
        _begin(looks=10**9, timeout=0.04)


def test_folders_on_the_way_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    opened: list[str] = []
    real = os.open

    def spy(path: Any, *arguments: Any, **options: Any) -> int:
        opened.append(str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", spy)
    assert not exists_anew(tmp_path / "run" / "checkpoints" / "marker")
    assert opened[-3:] == [str(tmp_path), str(tmp_path / "run"), str(tmp_path / "run" / "checkpoints")]
    assert exists_anew(tmp_path)


class Names:
    """A storage that has these names, and ranks of which the first one has a checkpoint."""

    rank = 0

    def __init__(self, *names: str, rank: int = 0) -> None:
        self.listed, self.rank, self.axis = names, rank, self

    def names(self) -> tuple[str, ...]:
        return self.listed

    def broadcast(self, value: object) -> object:
        return value if self.rank == 0 else True


def test_the_first_rank_decides_whether_a_checkpoint_follows() -> None:
    """Before, a host that didn't see it waited in another collective than the others, up to launch.timeout."""
    empty, saved = cast("Any", Names()), cast("Any", Names("step-00000002"))
    first, second = cast("Any", Names()), cast("Any", Names(rank=1))
    assert resuming.a_checkpoint_follows(lambda: empty, None, second)
    assert resuming.a_checkpoint_follows(lambda: saved, None, first)
    assert resuming.a_checkpoint_follows(lambda: empty, saved, first)
    assert not resuming.a_checkpoint_follows(lambda: empty, empty, first)
