"""The page of a plan: bars as wide as their parts take, and which runs none beats."""

from __future__ import annotations

import re
from pathlib import Path

from lockstep.simulation.page import PlannedStep, write_plan
from lockstep.simulation.timing import SHARES, Share, StepTime


def step(**parts: float) -> StepTime:
    seconds: dict[Share, float] = dict.fromkeys(SHARES, 0.0)
    seconds.update(parts)  # type: ignore[arg-type]
    return StepTime(sum(seconds.values()), seconds, 0.0, 1.0, 0.5)


def test_bars_and_the_runs_that_none_beats(tmp_path: Path) -> None:
    steps = [
        PlannedStep("8 x A", step(matmul=0.2, host=0.2), hours=2.0, cost=10.0),
        PlannedStep("8 x B", step(matmul=0.1, communication=0.1), hours=1.0, cost=20.0),
        PlannedStep("8 x C", step(matmul=0.3), "doesn't fit", hours=0.00041, cost=30.0),
        PlannedStep("8 x D", step(matmul=0.3), hours=3.0, cost=15.0),
    ]
    text = write_plan(tmp_path / "plan.html", "<mine>", steps, "USD").read_text()
    assert "&lt;mine&gt;" in text
    assert "<mine>" not in text
    found = map(float, re.findall(r'width="([\d.]+)%" height="18" fill', text))
    widths = [width for width in found if width]
    assert widths == [50.0, 50.0, 25.0, 25.0, 75.0, 75.0]
    assert "attention" not in text, "no step has it"
    labels = re.findall(r"8 x (\w): ([\d.e-]+) hours, ([\d.]+)", text)
    assert labels == [("C", "4.10e-04", "30.00"), ("B", "1", "20.00"), ("A", "2", "10.00"), ("D", "3", "15.00")]
    filled = re.findall(r'r="5"[^>]*fill="([^"]+)"', text)
    assert [fill != "none" for fill in filled] == [True, True, True, False], "A is faster and cheaper than D"
