"""`lockstep doctor RUN` names ends that no log states: full disks, exits, hangs, losses of short runs."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.commands import run_lockstep, start_lockstep
from kit.failures import gives

from lockstep.core.failure_kinds import FailureKind
from lockstep.core.stopping import _SAME_REQUEST
from lockstep.doctor.losses import finding_of_losses
from lockstep.doctor.run import describe_run, diagnose_run, run_as_json
from lockstep.launch.ends_file import file_name
from lockstep.report.series import Series

PROGRAM = """
import os, time, torch

class Points(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return {"x": torch.randn(4), "labels": index % 2}

def fill(place, free):
    metrics = os.path.join(os.path.dirname(place), "run", "metrics.jsonl")
    for _ in range(100):  # until a thread has written the updates before
        if os.path.exists(metrics) and open(metrics).read().count("\\n") >= 2:
            break
        time.sleep(0.05)
    with open(place, "wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(1 << 14))
        except OSError:
            file.truncate(max(0, os.path.getsize(place) - free))

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.large, self.calls = torch.nn.Linear(4, 2), torch.nn.Linear(256, 256), 0
    def forward(self, x):
        self.calls += 1
        if self.calls == 3:
            FAULT
        return self.layer(x) + 0 * self.large(torch.zeros(256))[0]
"""
CONFIG = {
    "model": {"kind": "custom", "target": "mine.py:Net"},
    "objective": {"kind": "classification"},
    "data": {"train": {"kind": "custom", "target": "mine.py:Points"}},
    "batch": {"global_size": 8},
    "launch": {"device": "cpu"},
    "monitor": {"tensorboard": False, "every": 1},
    "run": {"steps": 6, "folder": "run"},
    "recovery": {"restarts": 0},
}


def write_program(folder: Path, fault: str) -> None:
    (folder / "mine.py").write_text(PROGRAM.replace("FAULT", fault))
    (folder / "run.json").write_text(json.dumps(CONFIG))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    place = tmp_path / "small disk"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", place], capture_output=True).returncode:
        pytest.skip("a file system can't be mounted here")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.parametrize("free", [0, 1 << 18], ids=["to the last byte", "for checkpoints"])
def test_a_full_disk_is_named_with_the_place_of_the_rescued_state(free: int, small_disk: Path, tmp_path: Path) -> None:
    write_program(tmp_path, f"fill({str(small_disk / 'x')!r}, {free})")
    done = run_lockstep("train", "run.json", "--ranks", 1, f"run.folder={small_disk}/run", cwd=tmp_path)
    assert done.returncode == 1, done
    explained = run_lockstep("doctor", small_disk / "run", cwd=tmp_path)
    assert explained.returncode == 3
    assert "cause: disk full" in explained.stdout
    assert "the run continued" not in explained.stdout
    state = "6 of 6 without a record: its disk is full" if free == 0 else "6 of 6: the state after step 6 could not be"
    assert f": failed after step {state}" in explained.stdout
    assert gives(explained.stdout, "state after step 6", "memory")
    assert gives(done.stderr, "step 6", "memory"), "the run itself printed the same"
    command = explained.stdout.splitlines()[-1].strip()
    assert shlex.split(command) == ["lockstep", "train", str(small_disk / "run")]
    (small_disk / "x").unlink()
    resumed = run_lockstep(*shlex.split(command)[1:], cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert "step 6" in resumed.stdout


def test_the_last_word_on_a_full_disk_names_one_place(small_disk: Path, tmp_path: Path) -> None:
    write_program(tmp_path, f"fill({str(small_disk / 'x')!r}, {1 << 18})")
    done = run_lockstep("train", "run.json", "--ranks", 2, f"run.folder={small_disk}/run", cwd=tmp_path)
    assert done.returncode == 1, done
    assert done.stderr.count("the same command resumes from it") == 1, done.stderr


EXITS = [
    ("import sys; sys.exit(3)", 1, "called sys.exit(3) in ", "cause: a rank exited"),
    ("import sys; sys.exit(2)", 1, "failed after step 2 of 6: rank 0 called sys.exit(2)", "cause: a rank exited"),
    ("import sys; sys.exit(130)", 1, "failed after step 2 of 6: rank 0 called", "cause: a rank exited"),
    ("import sys; sys.exit(0)", 1, "called sys.exit(0) in ", "cause: a rank exited"),
    ("os._exit(0)", 0, "without a record: its process was killed or called os._exit()", "search the program for"),
    ("import no_such_package", 1, "No module named 'no_such_package'", "cause: package missing"),
    ("from os import nothing", 1, "cannot import name 'nothing'", "cause: an exception"),
]


@pytest.mark.parametrize(("fault", "code", "state", "cause"), EXITS, ids=[fault for fault, *_ in EXITS])
def test_a_program_that_ends_itself_is_named(fault: str, code: int, state: str, cause: str, tmp_path: Path) -> None:
    write_program(tmp_path, fault)
    assert run_lockstep("train", "run.json", "--ranks", 1, cwd=tmp_path).returncode == code
    explained = run_lockstep("doctor", "run", cwd=tmp_path)
    assert explained.returncode == 3, explained
    assert state in explained.stdout
    assert cause in explained.stdout
    assert explained.stdout.splitlines()[-1].split() == ["lockstep", "train", "run"]


def test_a_run_that_died_before_its_first_update_is_named(tmp_path: Path) -> None:
    write_program(tmp_path, "pass")
    source = (tmp_path / "mine.py").read_text()
    (tmp_path / "mine.py").write_text(source.replace("self.calls == 3", "self.calls == 1").replace("pass", "1 / 0"))
    assert run_lockstep("train", "run.json", "--ranks", 1, cwd=tmp_path).returncode == 1
    text = run_lockstep("doctor", "run", cwd=tmp_path).stdout
    assert gives(text, "failed", "first update")
    assert "ZeroDivisionError" in text
    assert "No checkpoint" in text


def test_the_state_in_the_memory_of_a_killed_launcher_is_named(tmp_path: Path) -> None:
    write_program(tmp_path, "time.sleep(60)")
    words = ("--ranks", 2, "recovery.snapshot_every=1", "checkpoint.every=null", "recovery.watchdog.enabled=false")
    running = start_lockstep("train", "run.json", *words, cwd=tmp_path)
    metrics = tmp_path / "run" / "metrics.jsonl"
    running.wait_for(lambda: metrics.exists() and metrics.read_text().count("\n") == 2)
    running.send(signal.SIGKILL)
    assert running.end() == -signal.SIGKILL
    text = run_lockstep("doctor", "run", cwd=tmp_path).stdout
    (folder,) = re.findall(r"The state after step [12] is in this host's memory, in (\S+)\.", text)
    shutil.rmtree(folder)
    assert "No checkpoint exists" in run_lockstep("doctor", "run", cwd=tmp_path).stdout


def test_a_hang_that_the_timeout_ends_is_named(tmp_path: Path) -> None:
    write_program(tmp_path, "time.sleep(1000 * (os.environ['RANK'] == '1'))")
    done = run_lockstep("train", "run.json", "--ranks", 2, "launch.timeout=1", cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    text = run_lockstep("doctor", "run", cwd=tmp_path).stdout
    assert gives(text.splitlines()[0], "rank 1", "1 s")
    assert f"\ncause: {FailureKind.TIMED_OUT.title}\n" in text
    assert "py-spy dump" in text


def test_a_hang_that_a_person_ends_is_named(tmp_path: Path) -> None:
    write_program(tmp_path, "print('hangs', flush=True); time.sleep(1000)")
    running = start_lockstep("train", "run.json", "--ranks", 2, cwd=tmp_path)
    running.wait_for(lambda: "hangs" in (tmp_path / "out").read_text())
    metrics = tmp_path / "run" / "metrics.jsonl"
    running.wait_for(lambda: metrics.exists() and '"step": 2,' in metrics.read_text())  # it is written within a second
    for name in ("metrics.jsonl", "events.jsonl"):
        if (file := tmp_path / "run" / name).exists():
            os.utime(file, (file.stat().st_atime, file.stat().st_mtime - 300))  # instead of waiting so long
    running.send(signal.SIGINT)
    running.wait_for(lambda: "the same signal again stops at once" in running.output)
    time.sleep(_SAME_REQUEST)
    running.send(signal.SIGINT)
    assert running.end() == 130
    explained = run_lockstep("doctor", "run", cwd=tmp_path)
    assert explained.returncode == 3
    assert gives(explained.stdout.splitlines()[0], "without progress", "step 2", 6)
    assert "cause: no progress\n" in explained.stdout
    assert gives(explained.stdout, "metrics.jsonl", "5 min")


# --- who killed a rank ----------------------------------------------------------------------------------------------


def failed_run(folder: Path, kind: str = "killed", log: str = "", host: str = "elsewhere") -> Path:
    """The folder of a run, one of whose ranks SIGKILL has ended."""
    run = folder / "run"
    (run / "logs").mkdir(parents=True)
    (run / "config.yaml").write_text("run: {steps: 10}\n")
    (run / "logs" / "rank-0.log").write_text(log)
    end = {"rank": 0, "host": host, "kind": kind, "text": "was killed by SIGKILL", "time": 100.0}
    line = {"attempt": "", "time": 101.0, "kind": kind, "text": "rank 0 was killed by SIGKILL", "step": 3,
            "cause": 0, "ranks": [end], "logs": {}, "environment": {}}  # fmt: skip
    (run / "logs" / file_name(0)).write_text(json.dumps(line) + "\n")
    return run


@pytest.mark.parametrize(("kind", "name"), [("host_memory", "host out of memory"), ("killed", "a rank was killed")])
def test_the_headline_is_that_of_the_kind(kind: str, name: str, tmp_path: Path) -> None:
    (item,) = diagnose_run(failed_run(tmp_path, kind, log="rank 0 was killed by SIGKILL\n")).seen
    assert item.failure.name == name


# --- losses ---------------------------------------------------------------------------------------------------------

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("losses", "text"),
    [
        ([0.7, 80.0, 1e4, 1e10], "has diverged: it was 0.7 at step 1"),
        ([0.7, 1e4, 1e4, 1e4], "has diverged"),
        ([2.3, 1e10], "has diverged"),
        ([0.7 * 2**step for step in range(15)], "has diverged"),
        ([*([0.5] * 40), 1e9, 1e10], "has diverged"),
        ([0.7, INF], "not finite from step 2 on"),
        ([0.7, 0.6, NAN, NAN], "not finite from step 3 on"),
        ([NAN], "not finite from step 1 on"),
        ([-1.0, 2.0, 1e6, 1e7], "has diverged"),
        ([-1.0 + step % 2 for step in range(30)] + [500.0] * 10, "has diverged"),
    ],
)
def test_a_run_that_diverged_is_named_however_short(losses: list[float], text: str) -> None:
    finding = finding_of_losses(Series.of("loss", range(1, len(losses) + 1), losses))
    assert finding is not None
    assert finding.is_wrong
    assert text in finding.text


@pytest.mark.parametrize(
    "losses",
    [
        [],
        [2.3],
        [2.3, 2.1],
        [2.3, 2.4, 2.9, 2.2, 2.6],
        [50_000.0, 900.0, 80.0, 30.0],
        [30.0, 80.0, 900.0],
        [0.0, 5.0, 4.0],
        [2.3, 2.2, 9e9, 2.1, 2.0],
        [2.3, 2.2, 2.1, 2.0, 9e9],
        [0.001, -3.0, 5.0, -8.0, 12.0],
        [0.69 + 0.02 * step for step in range(100)],
        [-0.01, -5.0, -80.0, -5000.0],
        [-5.0 + step % 7 for step in range(60)],
        [2.0 - step / 10 for step in range(60)],
    ],
)
def test_no_other_run_is_called_diverged(losses: list[float]) -> None:
    finding = finding_of_losses(Series.of("loss", range(1, len(losses) + 1), losses))
    assert finding is None or not finding.is_wrong, finding


# --- what is printed ------------------------------------------------------------------------------------------------


def test_nothing_is_cut_in_a_file_and_a_terminal_has_its_width(tmp_path: Path) -> None:
    message = "CUDA out of memory " + "x" * 500 + " tail"
    run = failed_run(tmp_path, "out_of_memory", log=f"{message}\n")
    diagnosis = diagnose_run(run)
    assert message in describe_run(diagnosis, None)
    assert message in run_as_json(diagnosis)["failures"][0]["evidence"][-1]["text"]
    for width in (60, 200):
        lines = describe_run(diagnosis, width).splitlines()[1:]
        assert max(len(line) for line in lines if str(tmp_path) not in line) <= width


def test_the_command_cuts_nothing_in_a_pipe_and_takes_the_terminals_width(tmp_path: Path) -> None:
    message = "CUDA out of memory " + "y" * 100
    failed_run(tmp_path, "out_of_memory", log=f"{message}\n")
    words = [sys.executable, "-m", "lockstep", "doctor", "run"]
    piped = run_lockstep("doctor", "run", cwd=tmp_path)
    assert f"logs/rank-0.log:1: {message}\n" in piped.stdout
    primary, terminal = os.openpty()
    import fcntl
    import struct
    import termios

    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 66, 0, 0))
    variables = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    subprocess.run(words, cwd=tmp_path, stdout=terminal, stderr=terminal, env=variables)
    os.close(terminal)
    shown = b""
    try:
        while data := os.read(primary, 1 << 16):
            shown += data
    except OSError:  # the other side is closed
        pass
    os.close(primary)
    lines = shown.decode().splitlines()[1:]
    assert 50 < max(len(line) for line in lines if "lockstep train" not in line) <= 66
    assert f"cause: {FailureKind.OUT_OF_MEMORY.title}" in lines
