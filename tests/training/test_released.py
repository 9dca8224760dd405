"""What a run leaves behind in a process that continues: no lock on its checkpoints, and no thread."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
from kit import small

import lockstep

_LOCK = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"


def _is_locked(checkpoints: Path) -> bool:
    """Return whether another process finds the folder locked."""
    command = [sys.executable, "-c", _LOCK, str(checkpoints / ".lock")]
    return subprocess.run(command, stderr=subprocess.DEVNULL, check=False).returncode != 0


def _train(folder: Path, *, fails: bool = False) -> None:
    with lockstep.session(small.config()) as session:
        saves = session.checkpoints(folder)
        next(iter(session))
        saves.save()
        assert _is_locked(folder)
        if fails:
            raise ValueError("a bug")


def test_the_end_of_a_session_unlocks_its_checkpoints(tmp_path: Path) -> None:
    _train(tmp_path)
    assert (tmp_path / "step-00000001").is_dir(), "the last save has ended"
    assert not _is_locked(tmp_path)
    with pytest.raises(ValueError, match="a bug"):
        _train(tmp_path, fails=True)
    assert not _is_locked(tmp_path)


def test_a_second_session_of_a_process_is_refused(tmp_path: Path) -> None:
    with lockstep.session(small.config()) as first, lockstep.session(small.config()) as second:
        first.checkpoints(tmp_path)
        with pytest.raises(lockstep.RunFailed, match="another run saves"):
            second.checkpoints(tmp_path)
        assert _is_locked(tmp_path)
    with lockstep.session(small.config()) as third:
        third.checkpoints(tmp_path)


def test_train_leaves_no_lock_and_no_thread(tmp_path: Path) -> None:
    before = {*threading.enumerate()}
    lockstep.train(small.config(run={"steps": 2, "folder": str(tmp_path)}))
    assert not _is_locked(tmp_path / "checkpoints")
    for thread in {*threading.enumerate()} - before:
        if thread.name == "lockstep-console":
            thread.join(10)  # it may not have ended yet
            assert not thread.is_alive()
