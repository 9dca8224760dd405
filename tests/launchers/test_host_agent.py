"""The process on each host of `launch ssh` and `launch ray`: what it runs ends with it."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockstep.launchers.host_agent import REPLY

SERVES = "import sys; from lockstep.launchers.host_agent import serve; sys.exit(serve('.'))"
LAUNCHER = """
import signal, sys, time
def end(*unused):
    open("saved", "w").close()
    if "hangs" not in sys.argv:
        sys.exit(75)
signal.signal(signal.SIGTERM, end)
open("started", "w").close()
while "ends" not in sys.argv:
    time.sleep(0.1)
sys.exit(3)
"""


@contextmanager
def serving(folder: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """The process, which has started a stand-in for Lockstep."""
    package = folder / "lockstep"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(LAUNCHER)
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", SERVES], stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd=folder
    )
    assert process.stdin is not None
    order = {"words": words, "environment": {"PYTHONPATH": str(folder)}, "grace": 1}
    process.stdin.write(json.dumps(order) + "\n0\n")
    process.stdin.flush()
    try:
        while not (folder / "started").exists():
            assert process.poll() is None
        yield process
    finally:
        process.kill()
        process.communicate()


def test_its_exit_code_is_the_commands(tmp_path: Path) -> None:
    with serving(tmp_path, "ends") as process:
        assert process.wait(30) == 3
        assert process.stdout is not None
        facts = json.loads(process.stdout.read().removeprefix(REPLY))
    assert 0 < facts["port"] < 65536
    assert facts["address"]


def test_a_signal_is_passed_on(tmp_path: Path) -> None:
    with serving(tmp_path) as process:
        assert process.stdin is not None
        process.stdin.write(f"{int(signal.SIGTERM)}\n")
        process.stdin.flush()
        assert process.wait(30) == 75


@pytest.mark.parametrize(("words", "code"), [((), 75), (("hangs",), 137)])
def test_without_a_terminal_the_command_saves_and_what_is_left_is_killed(
    words: tuple[str, ...], code: int, tmp_path: Path
) -> None:
    with serving(tmp_path, *words) as process:
        assert process.stdin is not None
        process.stdin.close()
        process.stdin = None
        assert process.wait(30) == code
    assert (tmp_path / "saved").exists()
