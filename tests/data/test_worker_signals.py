"""Data workers ignore signals, end with their rank however it ends, and can be stopped by it. Real processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from kit.commands import processes_of_group
from kit.worlds import served

from lockstep.core.records import Batch
from lockstep.data.fetching import FetchRequest, Workers, fetch_all

METHODS = ("fork", "forkserver", "spawn")
_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Slow:
    """A source that takes `seconds` for each batch and records the process that fetches."""

    draws = False

    def __init__(self, seconds: float, folder: Path) -> None:
        self.seconds, self.folder = seconds, folder

    def fetch(self, indices: object) -> Batch:
        (self.folder / f"worker-{os.getpid()}").touch()
        time.sleep(self.seconds)
        return Batch({}, torch.zeros(1), 1, 1)


class Stuck(Slow):
    """A source that never returns the third batch."""

    def fetch(self, indices: np.ndarray) -> Batch:
        self.seconds = 300.0 if indices[0] > 1 else 0.0
        return super().fetch(indices)


class StartsAProgram(Slow):
    """A source that starts a program and terminates it."""

    def fetch(self, indices: object) -> Batch:
        program = subprocess.Popen(["sleep", "60"])
        program.terminate()
        (self.folder / f"program-{program.wait(5)}").touch()
        return super().fetch(indices)


def _rank(source: Slow, method: str, folder: Path) -> None:
    """Handle signals like a rank, and fetch until the file `close` exists."""
    os.setsid()
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    multiprocessing.set_start_method(method, force=True)
    for number in _SIGNALS:
        signal.signal(number, lambda *_: None)
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 1.0  # seconds that workers have to exit
    requests = (FetchRequest(np.array([index]), False, 0, None) for index in range(10**6))
    batches = fetch_all(source, requests, Workers(number=2, prefetch=2, pin=False, key=0))  # type: ignore[arg-type]
    (folder / "ready").touch()
    for _ in batches:
        if (folder / "close").exists():
            break
    start = time.monotonic()
    batches.close()  # type: ignore[attr-defined]
    (folder / "closed").write_text(f"{time.monotonic() - start}")


def _wait(condition: object, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _workers(folder: Path) -> list[int]:
    return [int(file.name.partition("-")[2]) for file in folder.glob("worker-*")]


@pytest.mark.parametrize(
    "method", [pytest.param(m, marks=() if m == "fork" else pytest.mark.drill) for m in METHODS]
)  # a fork server, and fresh interpreters, import torch again
def test_workers_ignore_signals_to_the_group_and_end_with_the_rank(method: str, tmp_path: Path) -> None:
    rank = served().Process(target=_rank, args=(Slow(0.01, tmp_path), method, tmp_path))
    rank.start()
    _wait((tmp_path / "ready").exists)
    while len(_workers(tmp_path)) < 2:  # signals are also sent while they start
        for number in _SIGNALS:
            os.killpg(rank.pid, number)
        time.sleep(0.05)
        assert rank.is_alive()
    for number in _SIGNALS:
        os.killpg(rank.pid, number)
    time.sleep(0.3)
    assert rank.is_alive()
    assert set(_workers(tmp_path)) <= set(processes_of_group(rank.pid))
    rank.kill()
    _wait(lambda: not processes_of_group(rank.pid), 10)


def test_a_worker_that_is_stuck_is_killed(tmp_path: Path) -> None:
    rank = served().Process(target=_rank, args=(Stuck(0.0, tmp_path), "fork", tmp_path))
    (tmp_path / "close").touch()
    rank.start()
    _wait(lambda: len(_workers(tmp_path)) == 2 or not rank.is_alive())  # a loaded machine may miss the moment
    rank.join(60)
    assert rank.exitcode == 0
    assert float((tmp_path / "closed").read_text()) < 20
    assert not processes_of_group(rank.pid)


def test_a_program_started_by_the_dataset_can_be_terminated(tmp_path: Path) -> None:
    rank = served().Process(target=_rank, args=(StartsAProgram(0.0, tmp_path), "fork", tmp_path))
    rank.start()
    _wait((tmp_path / f"program-{-signal.SIGTERM}").exists, 20)
    (tmp_path / "close").touch()
    rank.join(60)
    assert rank.exitcode == 0
