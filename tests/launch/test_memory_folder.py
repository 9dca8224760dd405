"""The launcher's folder in memory: who may use it, and when it is removed."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from lockstep.launch.memory_folder import MemoryFolder, left_by, note_attempt


def made(run: Path, root: Path) -> MemoryFolder:
    folder = MemoryFolder.make(run, root)
    assert folder is not None
    return folder


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "shm").mkdir()
    return tmp_path / "shm"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "attempts.jsonl").write_text("first\n")
    return folder


def abandoned(run: Path, root: Path) -> Path:
    """A folder that a launcher has left, with a snapshot of the run's last attempt."""
    folder = made(run, root)
    (folder.path / "checkpoints").mkdir()
    note_attempt(folder.path, run)
    folder.leave()
    return folder.path / "checkpoints"


def test_it_ends_with_its_launcher(run: Path, root: Path) -> None:
    folder = made(run, root)
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.remove()
    folder.remove()
    assert not any(root.iterdir())


def test_the_next_start_of_the_run_finds_what_a_killed_launcher_has_left(run: Path, root: Path) -> None:
    left = abandoned(run, root)
    assert made(run, root).path == left.parent
    assert left.exists()


def test_what_a_killed_launcher_has_left_is_known_as_long_as_the_run_resumes_from_it(run: Path, root: Path) -> None:
    assert left_by(run, root) is None
    left = abandoned(run, root)
    assert left_by(run, root) == left.parent
    (run / "attempts.jsonl").write_text("first\nsecond, on another host\n")
    assert left_by(run, root) is None


def test_after_an_attempt_elsewhere_it_is_empty(run: Path, root: Path) -> None:
    left = abandoned(run, root)
    (run / "attempts.jsonl").write_text("first\nsecond, on another host\n")
    made(run, root)
    assert not left.exists()


def test_other_runs_remove_it_after_an_hour(run: Path, root: Path, tmp_path: Path) -> None:
    left = abandoned(run, root)
    made(tmp_path / "other", root).remove()
    assert left.exists()
    hours_ago = time.time() - 7200
    for path in (left.parent, *left.parent.iterdir()):
        os.utime(path, (hours_ago, hours_ago))
    made(tmp_path / "other", root).remove()
    assert not left.exists()


def test_one_that_is_in_use_stays(run: Path, root: Path, tmp_path: Path) -> None:
    used = made(run, root)
    hours_ago = time.time() - 7200
    for path in (used.path, *used.path.iterdir()):
        os.utime(path, (hours_ago, hours_ago))
    made(tmp_path / "other", root)
    assert used.path.exists()
    assert MemoryFolder.make(run, root) is None


def test_what_somebody_else_has_prepared_is_not_used(run: Path, root: Path, tmp_path: Path) -> None:
    folder = made(run, root)
    folder.remove()
    folder.path.symlink_to(tmp_path)
    assert MemoryFolder.make(run, root) is None
    folder.path.unlink()
    folder.path.mkdir(mode=0o777)
    folder.path.chmod(0o777)
    assert MemoryFolder.make(run, root) is None


def test_without_memory_for_files_there_is_none(run: Path, tmp_path: Path) -> None:
    assert MemoryFolder.make(run, tmp_path / "missing") is None


def test_snapshots_of_several_hosts_stay(run: Path, root: Path) -> None:
    snapshots = abandoned(run, root)
    shutil.rmtree(run)
    again = MemoryFolder.make(run, root, hosts=2)
    assert again is not None
    assert snapshots.exists(), "who reads them checks them"
    again.leave()
