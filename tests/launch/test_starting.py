"""Ranks of the next round are started ahead, and wait: used when they are needed, and never left over."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from kit.waiting import wait_until

if TYPE_CHECKING:
    from conftest import ForkServer


def pids(folder: Path, what: str) -> list[int]:
    return [int(file.read_text()) for file in sorted(folder.glob(f"{what}-*"))]


def both_wait(folder: Path) -> bool:
    return len([file for file in folder.glob("ahead-*") if file.read_text()]) == 2


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("then", "changes", "are_used"),
    [
        ("kill", False, True),
        ("kill", True, False),
        ("kill one that waits, too", False, False),
    ],
    ids=["a rank is killed", "and the next round does something else", "and so is one that waits"],
)
def test_the_next_round(fork_server: ForkServer, tmp_path: Path, then: str, changes: bool, are_used: bool) -> None:
    code, _, err = fork_server.run("round_ahead", folder=str(tmp_path), then=then, changes=changes)
    assert code == 0, err
    ahead, needed = pids(tmp_path, "ahead"), pids(tmp_path, "needed")
    assert len(needed) == 2
    assert set(needed) & set(ahead) == (set(ahead) if are_used else set())
    assert not any(map(is_alive, ahead))


def test_the_time_in_which_they_have_waited_does_not_count_as_that_of_a_hang(
    fork_server: ForkServer, tmp_path: Path
) -> None:
    code, _, err = fork_server.run("slow_after_waiting", folder=str(tmp_path))
    assert code == 0, err
    assert pids(tmp_path, "needed") == pids(tmp_path, "ahead")
    assert "moved" not in err


def test_a_run_that_is_done_leaves_none(fork_server: ForkServer, tmp_path: Path) -> None:
    code, _, err = fork_server.run("round_ahead", folder=str(tmp_path), then="return")
    assert (code, err) == (0, "")
    assert pids(tmp_path, "needed") == []
    assert not any(map(is_alive, pids(tmp_path, "ahead")))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM], ids=["SIGKILL", "SIGTERM"])
def test_a_launcher_that_ends_leaves_none(fork_server: ForkServer, tmp_path: Path, number: signal.Signals) -> None:
    launched = fork_server.start("round_ahead", folder=str(tmp_path), then="sleep")
    wait_until(lambda: both_wait(tmp_path))
    ahead = pids(tmp_path, "ahead")
    assert all(map(is_alive, ahead))
    os.kill(launched.pid, number)
    assert launched.wait() == (-number if number is signal.SIGKILL else 75)
    wait_until(lambda: not any(map(is_alive, ahead)))
    assert pids(tmp_path, "needed") == []


def test_signals_to_all_processes_reach_one_that_waits_in_silence(fork_server: ForkServer, tmp_path: Path) -> None:
    launched = fork_server.start("round_ahead", folder=str(tmp_path), then="sleep")
    wait_until(lambda: both_wait(tmp_path))
    for pid in pids(tmp_path, "ahead"):
        os.kill(pid, signal.SIGUSR2)
    os.kill(launched.pid, signal.SIGTERM)
    launched.wait()
    assert "nothing to save" not in launched.err
