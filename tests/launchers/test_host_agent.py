"""The process on each host of `launch ssh` and `launch ray`: a launcher that is killed there is started again."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

SERVES = "import sys; from lockstep.launchers.host_agent import serve; sys.exit(serve())"
LAUNCHER = """
import os, signal, sys, time
def end(*unused):
    os.kill(os.getpid(), signal.SIGKILL)
signal.signal(signal.SIGTERM, end)
with open("starts", "a") as file:
    file.write(" ".join(sys.argv[1:]) + "\\n")
starts = len(open("starts").readlines())
if starts <= int(os.environ["KILLS"]):
    end()
if "waits" in sys.argv:
    time.sleep(60)
sys.exit(3)
"""


@contextmanager
def serving(folder: Path, kills: int, *words: str) -> Iterator[subprocess.Popen[str]]:
    """The process, which has started a stand-in for Lockstep that is killed this many times."""
    package = folder / "lockstep"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(LAUNCHER)
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", SERVES], stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=folder
    )
    assert process.stdin is not None
    environment = {"PYTHONPATH": str(folder), "KILLS": str(kills)}
    again = [word for word in words if word != "--fresh"]
    order = {"do": "start", "words": words, "restart_words": again, "environment": environment, "grace": 1}
    process.stdin.write(json.dumps(order) + "\n")
    process.stdin.flush()
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(("kills", "starts", "code"), [(0, 1, 3), (2, 3, 3), (9, 4, 137)])
def test_it_is_started_again_but_not_for_ever(tmp_path: Path, kills: int, starts: int, code: int) -> None:
    with serving(tmp_path, kills, "train", "--fresh", "digits") as process:
        assert process.wait(30) == code
        assert process.stderr is not None
        assert process.stderr.read().count("was killed by SIGKILL; it is started again") == starts - 1
    first, *others = (tmp_path / "starts").read_text().splitlines()
    assert first == "train --fresh digits"
    assert others == ["train digits"] * (starts - 1)


def test_one_that_was_to_end_is_not(tmp_path: Path) -> None:
    with serving(tmp_path, 0, "waits") as process:
        while not (tmp_path / "starts").exists() or not (tmp_path / "starts").read_text():
            assert process.poll() is None
        assert process.stdin is not None
        process.stdin.write(json.dumps({"do": "signal", "number": int(signal.SIGTERM)}) + "\n")
        process.stdin.flush()
        assert process.wait(30) == 137
    assert len((tmp_path / "starts").read_text().splitlines()) == 1
