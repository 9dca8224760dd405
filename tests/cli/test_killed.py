"""Runs killed at random times end like an uninterrupted run: a small `drills/kill_drill.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

DRILL = Path(__file__).parents[2] / "drills" / "kill_drill.py"
RANKS = [2]
SAMPLES = 1438 + 17 * 64  # of 40 updates: the first epoch ends with a smaller one


@pytest.fixture(scope="module")
def drills(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, tuple[subprocess.Popen[str], Path]]]:
    """Run both at once, because most of the time is start-up."""
    pytest.importorskip("sklearn")
    words = [sys.executable, str(DRILL), "runs", "--recipe=digits", "--kills=1", "--steps=40", "--then="]
    places = {ranks: tmp_path_factory.mktemp(f"drill-{ranks}") for ranks in RANKS}
    running = {
        ranks: subprocess.Popen(
            [*words, f"--ranks={ranks}", f"--seed={ranks}", f"--results={place}"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for ranks, place in places.items()
    }  # fmt: skip
    yield {ranks: (running[ranks], places[ranks]) for ranks in RANKS}
    for process in running.values():
        process.terminate()
        process.wait()


@pytest.mark.parametrize("ranks", RANKS)
def test_killed_runs_end_like_an_uninterrupted_one(
    drills: dict[int, tuple[subprocess.Popen[str], Path]], ranks: int
) -> None:
    drill, place = drills[ranks]
    output, _ = drill.communicate(timeout=240)
    assert drill.returncode == 0, output
    result = json.loads((place / "kill_drill_runs.json").read_text())
    assert result["lost"] == []
    assert len(result["kills"]) == 1
    assert result["samples"] == SAMPLES
    assert "nothing lost: weights, state, history and ledger are the undisturbed run's" in output
