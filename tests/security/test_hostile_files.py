"""Hostile files, whatever they should be: none executes, none ends in a traceback, none takes memory or time.

contents (hostile_contents.py)  x  places (a config, a run's files, weights, data)  -->  the commands that read them
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hostile_contents import CONTENTS
from kit import small
from kit.commands import run_lockstep

_MEMORY, _SECONDS = 2 * 2**30, 10.0
_READING = (["report", "*"], ["explain", "*"], ["doctor", "*"])
_LISTING = (["ckpt", "ls", "*"], ["ckpt", "audit", "*"], ["ckpt", "verify", "*"])
_CONFIG = (["config", "check", "*"], ["config", "show", "*"], ["config", "import", "*"])
PLACES: dict[str, tuple[list[str], ...]] = {
    "config.yaml": _CONFIG,
    "config.json": _CONFIG,
    "weights.pt": (["weights", "*"],),
    "weights.bin": (["weights", "*"],),
    "weights.safetensors": (["weights", "*"],),
    "text.jsonl": (["data", "prepare", "*", "--output", "out", "--tokenizer", "bytes"],),
    "run/config.yaml": (*_READING, *_LISTING, ["ls", "."], ["compare", "*", "*"]),
    "run/environment.json": _READING,
    "run/summary.json": (*_READING, ["ls", "."]),
    "run/metrics.jsonl": (*_READING, ["ls", "."], ["compare", "*", "*"]),
    "run/events.jsonl": _READING,
    "run/ranks.jsonl": _READING,
    "run/attempts.jsonl": _READING,
    "run/logs/ends.jsonl": (*_READING, ["ls", "."]),
    "run/run.lock": (*_READING, ["ls", "."]),
    "run/checkpoints/owner.json": _LISTING,
    "run/checkpoints/step-00000002/manifest.json": _LISTING,
    "run/checkpoints/step-00000002/rank-00000.safetensors": _LISTING,
    "run/model/XXH128SUMS": (["weights", "run/model"],),
}
CASES = [(place, name) for place in PLACES for name in CONTENTS]
_SAMPLE = 133  # parts of the table: the first is in the suite, the others are drills

_CHILD = """
import json, os, resource, signal, sys, time, traceback
from pathlib import Path

import lockstep.training.finished_run, lockstep.report, lockstep.report.comparison, lockstep.data.prepare
from lockstep.cli.main import main
from lockstep.core.errors import Failure
from lockstep.models.weight_files import read_weights

def command(words):
    if words[0] != "weights":
        return main(words)
    try:
        read_weights(Path(words[1]))
    except Failure as failure:
        print(failure)
        return failure.exit_code
    return 0

for line in sys.stdin:
    words = json.loads(line)
    output = os.memfd_create("output")
    child = os.fork()
    if child == 0:
        code = 99
        try:
            os.dup2(output, 1)
            os.dup2(output, 2)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
            signal.alarm(60)  # for a command that waits for ever, as in the open() of a pipe
            code = command(words) or 0
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 98
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    _, status, used = os.wait4(child, 0)
    text = os.pread(output, 100_000, 0).decode(errors="replace")
    os.close(output)
    seconds = used.ru_utime + used.ru_stime
    print(json.dumps([os.waitstatus_to_exitcode(status), text, seconds, 1024 * used.ru_maxrss]), flush=True)
"""


class Reader:
    """A process that has imported everything, and runs commands in forks of itself."""

    def __init__(self, folder: Path) -> None:
        environ = {**os.environ, "CANARY": str(folder / "canary"), "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD], stdin=-1, stdout=-1, text=True, cwd=folder / "work", env=environ
        )

    def run(self, words: list[str]) -> tuple[int, str, float, int]:
        """Return exit code, output, seconds of processor time, and the most memory."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(words) + "\n")
        self._process.stdin.flush()
        code, text, seconds, memory = json.loads(self._process.stdout.readline())
        return code, text, seconds, memory

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("hostile")
    (folder / "work").mkdir()
    config = small.config(run={"steps": 4}, checkpoint={"every": "2 steps"})
    (folder / "small.yaml").write_text(yaml.safe_dump(config))
    done = run_lockstep("train", folder / "small.yaml", "--run.folder", folder / "run")
    assert done.returncode == 0, done.stderr
    reader = Reader(folder)
    yield folder, reader
    reader.close()


def faults_of(folder: Path, reader: Reader, place: str, name: str) -> list[str]:
    """Return what is wrong with how the commands take a file."""
    work, faults = folder / "work", []
    for entry in work.iterdir():
        shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
    if place.startswith("run/"):
        shutil.copytree(folder / "run", work / "run", symlinks=True)
    file = work / place
    if file.is_dir():
        shutil.rmtree(file)
    file.unlink(missing_ok=True)
    content = CONTENTS[name]
    file.write_bytes(content) if isinstance(content, bytes) else content(file)
    target = place if not place.startswith("run/") else "run"
    for words in PLACES[place]:
        code, output, seconds, memory = reader.run([target if word == "*" else word for word in words])
        what = f"{place}, {name}: {' '.join(words)}: "
        if "Traceback (most recent call last)" in output or code not in (0, 1, 2, 3, 75):
            faults.append(f"{what}exit code {code}: {output[-600:]}")
        if seconds > _SECONDS or memory > _MEMORY:
            faults.append(f"{what}{seconds:.1f} s, {memory / 2**20:.0f} MiB")
        if "\x1b]0;" in output or "\x1b[2J" in output:
            faults.append(f"{what}steers the terminal")
    if (folder / "canary").exists():
        faults.append(f"{place}, {name}: executed")
        (folder / "canary").unlink()
    if leaked := [path.name for path in folder.iterdir() if path.name not in ("work", "run", "small.yaml")]:
        faults.append(f"{place}, {name}: wrote {leaked}")
    return faults


def test_there_are_more_than_a_thousand_files() -> None:
    assert len(CASES) > 1000


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=() if part == 0 else pytest.mark.drill) for part in range(_SAMPLE)]
)
def test_hostile_files(part: int, reader: Any) -> None:
    faults = [fault for place, name in CASES[part::_SAMPLE] for fault in faults_of(*reader, place, name)]
    assert not faults, "\n".join(faults)
