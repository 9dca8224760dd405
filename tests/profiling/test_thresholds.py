"""A cause that takes a share of an update's time is named by a profile and by the meters, or by neither."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from kit.failures import gives

from lockstep.profiling.findings import findings_of
from lockstep.profiling.traces import Trace, read_trace
from lockstep.report.limits import Limit, limits
from lockstep.report.rank_history import read_rank_history
from lockstep.report.run_data import read_run


def profiled(split: dict[str, float], waited: float) -> set[str]:
    facts = {"rank": 0, "host": "a", "first": 1, "last": 3, "ranks": 1, "waited_for_core": 3 * waited}
    seconds = sum(split.values())
    trace = Trace(Path("rank0"), facts, 3, seconds, split, (), 100, 0.0, {}, 0.0, (), None, None)
    return {finding.name for finding in findings_of([trace])}


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


def test_code_outside_of_operators_counts_in_all_micro_batches_and_a_wait_for_a_core_does_not(tmp_path: Path) -> None:
    """Two updates of 10 ms: 2 x 4 ms of forward, of which 1 ms is an operator's, and 2 ms of the optimizer."""
    events: list[dict[str, Any]] = []

    def add(category: str, name: str, begin: float, length: float) -> None:
        common = {"ph": "X", "pid": 1, "tid": 1, "args": {}}
        events.append({**common, "cat": category, "name": name, "ts": 1e3 * begin, "dur": 1e3 * length})

    for start in (0, 10):
        add("lockstep", f"lockstep/update {start}", start, 10)
        events[-1]["args"] = {"update": start}
        for begin in (start, start + 4):
            add("lockstep", "lockstep/forward", begin, 4)
            add("cpu_op", "aten::mm", begin + 3, 1)
        add("lockstep", "lockstep/optimizer", start + 8, 2)
        add("cpu_op", "aten::add", start + 8, 1.95)

    def findings(waited: float) -> list[Limit]:
        facts = {"rank": 0, "ranks": 1, "first": 1, "last": 2, "host": "a", "waited_for_core": waited}
        path = tmp_path / "rank0.1.pt.trace.json.gz"
        path.write_bytes(gzip.compress(json.dumps({"traceEvents": events, "lockstep": facts}).encode()))
        return [finding for finding in findings_of([read_trace(path)]) if finding.name == "host code"]

    (found,) = findings(waited=0.0)
    assert found.share == pytest.approx(0.6)
    assert gives(found.fact, "6 ms", "60%", "forward")
    assert findings(waited=0.004)[0].share == pytest.approx(0.4)
    assert findings(waited=0.010) == []
