"""A log that can't be written loses its lines: the terminal shows all output, and reports the loss once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_DOUBLED = """
from pathlib import Path
from lockstep.launch.streams import doubled
with doubled(Path({log!r})):
    for number in range(3):
        print("line", number, flush=True)
print("end")
"""
_REDIRECTED = """
from pathlib import Path
from lockstep.launch.streams import redirect
redirect(Path({log!r}))
for number in range(3):
    print("line", number, flush=True)
"""


def _run(program: str, log: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program.format(log=log)], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("log", ["/dev/full", "/no/such/folder/rank-0.log"])
def test_the_first_rank_continues_without_its_log(log: str) -> None:
    done = _run(_DOUBLED, log)
    assert done.returncode == 0
    assert done.stdout.splitlines() == ["line 0", "line 1", "line 2", "end"]
    assert done.stderr.count(f"{log} can't be written") == len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("log", ["/dev/full", "/no/such/folder/rank-1.log"])
def test_another_rank_continues_without_its_log(log: str) -> None:
    done = _run(_REDIRECTED, log)
    assert (done.returncode, done.stdout) == (0, "")
    assert f"{log} can't be written" in done.stderr


def test_a_log_gets_all_lines(tmp_path: Path) -> None:
    done = _run(_DOUBLED, str(tmp_path / "log"))
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "log").read_text().splitlines() == ["line 0", "line 1", "line 2"]
