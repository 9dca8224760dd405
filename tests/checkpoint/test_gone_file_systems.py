"""A file system that is gone for a while is waited for: a save or a load is repeated; a full disk is not."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.storing import save, state_of

from lockstep.checkpoint import local
from lockstep.checkpoint.inspection import verify_all
from lockstep.checkpoint.local import LocalStorage

STATE = [state_of({"model.a": torch.ones(8, 4)})]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make the first calls of a function of `os` fail; pauses take no time."""
    monkeypatch.setattr(local, "_FIRST_PAUSE_S", 1e-4)

    def fail(name: str, number: int, calls: int) -> None:
        function, left = getattr(os, name), [calls]

        def call(*arguments: Any, **more: Any) -> Any:
            if left[0] and ("step-" in str(arguments[0]) or isinstance(arguments[0], int)):
                left[0] -= 1
                raise OSError(number, os.strerror(number))
            return function(*arguments, **more)

        monkeypatch.setattr(os, name, call)

    return fail


@pytest.mark.parametrize("name", ["write", "fsync", "mkdir", "rename"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE, errno.EROFS])
def test_a_save_is_repeated(name: str, number: int, failing: Any, tmp_path: Path) -> None:
    failing(name, number, 3)
    assert save(LocalStorage(tmp_path, retry_seconds=30), STATE, 4) == []
    assert [result.fault for result in verify_all(LocalStorage(tmp_path))] == [None]


@pytest.mark.parametrize("name", ["open", "preadv"])
def test_a_load_is_repeated(name: str, failing: Any, tmp_path: Path) -> None:
    save(LocalStorage(tmp_path), STATE, 4)
    failing(name, errno.EIO, 3)
    assert [result.fault for result in verify_all(LocalStorage(tmp_path, retry_seconds=30))] == [None]


@pytest.mark.parametrize(("number", "seconds"), [(errno.ENOSPC, 30.0), (errno.EIO, 0.0), (errno.EIO, 0.01)])
def test_a_full_disk_is_not_waited_for_and_patience_ends(
    number: int, seconds: float, failing: Any, tmp_path: Path
) -> None:
    failing("write", number, 10_000)
    assert os.strerror(number) in str(save(LocalStorage(tmp_path, retry_seconds=seconds), STATE, 4))
