"""Signals to a run as schedulers, shells and people send them: to the launcher, to one rank, to the process group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from kit import small
from kit.commands import Running, processes_of_group, run_lockstep, start_lockstep

from lockstep.checkpoint.local import LocalStorage
from lockstep.checkpoint.storage import names_by_step


def _config(folder: Path, **sections: object) -> Path:
    run = {"folder": str(folder / "run"), "steps": 10**8}
    monitor = {"progress": "none", "tensorboard": False, "every": 1}
    sections = {"run": run, "monitor": monitor, "checkpoint": {"every": None}, **sections}
    sections["monitors"] = [{"target": "kit.waiting:Unhurried"}]
    file = folder / "config.yaml"
    file.write_text(yaml.safe_dump(small.config(**sections)))
    return file


def _trains(folder: Path) -> bool:
    metrics = folder / "run" / "metrics.jsonl"
    return metrics.exists() and metrics.stat().st_size > 0


def _saves(folder: Path) -> list[int]:
    return sorted(names_by_step(LocalStorage(folder / "run" / "checkpoints").names()))


def _send(running: Running, number: signal.Signals, target: str) -> None:
    if target == "rank":
        os.kill(running.ranks[-1], number)
    else:
        running.send(number, group=target == "group")


@pytest.mark.parametrize(
    ("ranks", "target"), [(1, "launcher"), (2, "launcher"), (2, "group"), (2, "rank")], ids=lambda value: str(value)
)
def test_sigusr2_saves_and_continues_and_sigusr1_saves_and_stops(ranks: int, target: str, tmp_path: Path) -> None:
    running = start_lockstep("train", _config(tmp_path), "--ranks", ranks, cwd=tmp_path)
    running.wait_for(lambda: _trains(tmp_path))
    for number in (1, 2):
        _send(running, signal.SIGUSR2, target)
        running.wait_for(lambda number=number: len(_saves(tmp_path)) == number)
        time.sleep(0.6)  # closer than that, signals are one request
    _send(running, signal.SIGUSR1, target)
    assert running.end() == 75, running.output
    assert "and saved; start it again" in running.output
    assert "Traceback" not in running.output
    saves = _saves(tmp_path)
    assert len(saves) == 3
    more = run_lockstep("train", tmp_path / "run", f"--run.steps={saves[-1] + 1}", "--ranks", 1, cwd=tmp_path)
    assert more.returncode == 0, more.stderr
    assert f"resumes from step {saves[-1]:,} " in more.stdout


def test_many_signals_are_one_request(tmp_path: Path) -> None:
    """A scheduler may signal every process, and again."""
    running = start_lockstep("train", _config(tmp_path), "--ranks", 2, cwd=tmp_path)
    running.wait_for(lambda: _trains(tmp_path))
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGTERM, signal.SIGUSR1):
        running.send(number, group=True)
        for rank in running.ranks:
            os.kill(rank, number)
    assert running.end() == 75, running.output
    assert len(_saves(tmp_path)) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1])
def test_data_workers_leave_signals_to_the_group_to_their_rank(number: signal.Signals, tmp_path: Path) -> None:
    config = _config(tmp_path, data={**small.config()["data"], "loader": {"workers": 2}})
    running = start_lockstep("train", config, "--ranks", 2, cwd=tmp_path)
    running.wait_for(lambda: _trains(tmp_path))
    assert len(processes_of_group(running.pid)) == 1 + 2 + 2 * 2
    running.send(signal.SIGUSR2, group=True)
    running.wait_for(lambda: _saves(tmp_path))
    running.send(number, group=True)
    assert running.end() == 75, running.output
    assert "and saved; start it again" in running.output
    assert "worker" not in running.output


def test_a_stop_before_the_first_update_is_one_sentence(tmp_path: Path) -> None:
    """At any moment; `drills/signal_drill.py` tries many more."""
    config = _config(tmp_path)
    for number, (after, sent, ranks) in enumerate(
        [(0.0, signal.SIGTERM, 2), (0.1, signal.SIGINT, 2), (0.25, signal.SIGTERM, 1), (0.4, signal.SIGUSR1, 2)]
    ):
        place = tmp_path / str(number)
        place.mkdir()
        running = start_lockstep("train", config, "--ranks", ranks, f"--run.folder={place / 'run'}", cwd=place)
        running.wait_for(lambda place=place: (place / "run").exists())
        time.sleep(after)
        begun = _trains(place)
        running.send(sent, group=bool(number % 2))
        code = running.end()
        assert "Traceback" not in running.output
        if _saves(place):  # the first update was faster
            assert code == 75
            continue
        assert not begun
        # one rank may be ahead
        announced = "lockstep: stops after this update, and saves; the same signal again stops at once\n"
        expected = 130 if sent is signal.SIGINT else 75  # a scheduler's: to be started again
        assert (code, running.output.removeprefix(announced)) == (expected, f"lockstep: stopped by {sent.name}\n")
        assert not (place / "run").exists() or (place / "run" / "config.yaml").exists()


@pytest.mark.parametrize("module", [True, False], ids=["python -m lockstep", "lockstep"])
def test_signals_are_handled_before_anything_is_imported(module: bool, tmp_path: Path) -> None:
    program = [sys.executable, "-m", "lockstep"] if module else [str(Path(sys.executable).with_name("lockstep"))]
    process = subprocess.Popen(
        [*program, "train", "stdlib-lm", "--ranks=2"], stderr=subprocess.PIPE, text=True, cwd=tmp_path
    )
    caught = Path(f"/proc/{process.pid}/status")
    while not _catches(caught, signal.SIGTERM):
        time.sleep(0.0005)
    imported = "torch" in Path(f"/proc/{process.pid}/maps").read_text()
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=60)[1] == "lockstep: stopped by SIGTERM\n"
    assert process.returncode == 75
    assert not imported
    assert not list(tmp_path.iterdir())


def _catches(status: Path, number: signal.Signals) -> bool:
    caught = next(line for line in status.read_text().splitlines() if line.startswith("SigCgt:"))
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


@pytest.mark.drill
@pytest.mark.parametrize("target", ["ranks", "torchrun too"])
def test_under_torchrun(target: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """It ends of SIGUSR1 and SIGUSR2 unless it is started with them ignored; ranks handle them all the same."""
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "lockstep", "train"]
    ignored = (signal.SIGUSR1, signal.SIGUSR2) if target == "torchrun too" else ()
    process = subprocess.Popen(
        [*program, str(_config(tmp_path)), "--launch.device=cpu"],
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(small.__file__).parents[1])},
        preexec_fn=lambda: [signal.signal(number, signal.SIG_IGN) for number in ignored] and None,
    )
    request.addfinalizer(lambda: process.poll() is None and process.terminate())
    deadline = time.monotonic() + 120
    while not _trains(tmp_path):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    pids = [int(rank) for rank in ranks] + ([process.pid] if ignored else [])
    for number in (signal.SIGUSR2, signal.SIGUSR1):
        for pid in pids:
            os.kill(pid, number)
        while len(_saves(tmp_path)) < (1 if number == signal.SIGUSR2 else 2):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        time.sleep(0.6)
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 1  # torchrun's, for every exit code of a rank
    assert "and saved; start it again" in said
    assert not processes_of_group(process.pid)
