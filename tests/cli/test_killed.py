"""Runs killed at random moments end as the undisturbed run: `drills/kill_drill.py`, as small as it goes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

DRILL = Path(__file__).parents[2] / "drills" / "kill_drill.py"


@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_runs_end_as_the_undisturbed_one(tmp_path: Path, ranks: int) -> None:
    pytest.importorskip("sklearn")
    words = ["runs", "--recipe=digits", "--kills=3", "--steps=40", "--then=", f"--ranks={ranks}", f"--seed={ranks}"]
    done = subprocess.run(
        [sys.executable, str(DRILL), *words, "--results", str(tmp_path)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / "kill_drill_runs.json").read_text())
    assert found["lost"] == []
    assert len(found["kills"]) == 3
    assert found["samples"] == 40 * 64
