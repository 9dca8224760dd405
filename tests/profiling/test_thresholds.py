"""A cause that takes a share of an update's time is named by a profile and by the meters, or by neither."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lockstep.profiling.findings import findings_of
from lockstep.profiling.traces import Trace
from lockstep.report.limits import limits
from lockstep.report.rank_history import read_rank_history
from lockstep.report.run_data import read_run


def profiled(split: dict[str, float], waited: float) -> set[str]:
    facts = {"rank": 0, "host": "a", "first": 1, "last": 3, "ranks": 1, "waited_for_core": 3 * waited}
    seconds = sum(split.values())
    trace = Trace(Path("rank0"), facts, 3, seconds, split, (), 100, 0.0, 0.0, 0.0, (), None, None)
    return {"saves" if finding.name == "save" else finding.name for finding in findings_of([trace])}


def measured(folder: Path, split: dict[str, float], waited: float) -> set[str]:
    (folder / "config.yaml").write_text("run: {steps: 100}\n")
    interval = {"step": 100, "time": 1.79e9, "seconds": 100.0, "ranks": [0], "updates": [100], "step_seconds": [1.0]}
    parts = {name: [seconds] for name, seconds in split.items()}
    gauges = {"core_wait_percent": [100 * waited]}
    interval |= {"slowest": [1.0], "split": parts, "gauges": gauges, "stragglers": []}
    (folder / "ranks.jsonl").write_text(json.dumps(interval) + "\n")
    return {limit.name for limit in limits(read_run(folder), read_rank_history(folder))}


@pytest.mark.parametrize("share", [0.02, 0.06, 0.09, 0.11, 0.14, 0.16, 0.22, 0.26, 0.5])
@pytest.mark.parametrize("cause", ["data", "save", "communication", "crowded host"])
def test_both_name_it_or_neither_does(tmp_path: Path, cause: str, share: float) -> None:
    waited = share if cause == "crowded host" else 0.0
    split = {"forward": 1.0} if waited else {"forward": 1.0 - share, cause: share}
    named = profiled(split, waited)
    assert named == measured(tmp_path, split, waited)
    assert named == ({"saves" if cause == "save" else cause} if share > least(cause) else set())


def least(cause: str) -> float:
    return {"data": 0.10, "save": 0.05, "communication": 0.25, "crowded host": 0.15}[cause]
