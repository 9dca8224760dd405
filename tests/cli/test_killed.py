"""Runs killed at random times end like an uninterrupted run: a small `drills/kill_drill.py`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kit.commands import run_script
from kit.worlds import fork_server

DRILL = Path(__file__).with_name("forked_kill_drill.py")
SAMPLES = 1438 + 17 * 64  # of 40 updates: the first epoch ends with a smaller one


@pytest.mark.drill
def test_killed_runs_end_like_an_uninterrupted_one(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    words = ["runs", "--recipe=digits", "--kills=1", "--steps=40", "--then=", "--ranks=2", "--seed=3"]
    drill = run_script(DRILL, fork_server(), *words, f"--results={tmp_path}", cwd=tmp_path)
    assert drill.returncode == 0, drill.stderr
    result = json.loads((tmp_path / "kill_drill_runs.json").read_text())
    assert result["lost"] == []
    assert len(result["kills"]) == 1
    assert result["samples"] == SAMPLES
