"""The clock's phases beside torch's profiler: both see the same forward, backward and data, within 3 % of an update."""

from __future__ import annotations

import gzip
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
from kit.worlds import in_process
from profiling import planted

from lockstep.profiling.traces import read_trace, trace_files
from lockstep.report.rank_history import read_rank_history


def test_phases_take_as_long_as_torch_profiler_records(tmp_path: Path) -> None:
    in_process(planted.train_annotated, tmp_path / "run")
    (path,) = trace_files(tmp_path / "run")
    trace = read_trace(path)
    assert trace.updates == 5
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    whole = [event for event in events if str(event.get("name")).startswith("lockstep/update ")]
    least = {"forward": 0.03, "backward": 0.045, "data": 0.02}

    def seconds(prefix: str, phase: str, update: dict[str, Any]) -> float:
        begin, end = update["ts"], update["ts"] + update["dur"]
        return sum(
            event["dur"] / 1e6
            for event in events
            if event.get("name") == f"{prefix}/{phase}" and "dur" in event and begin <= event["ts"] < end
        )

    for phase, shortest in least.items():
        recorded = [seconds("mine", phase, update) for update in whole]
        marked = [seconds("lockstep", phase, update) for update in whole]
        assert statistics.median(recorded) > shortest, phase
        assert all(mine <= clock + 1e-4 for mine, clock in zip(recorded, marked, strict=True)), phase
        beyond = statistics.median(clock - mine for mine, clock in zip(recorded, marked, strict=True))
        assert beyond < 0.03 * trace.seconds, phase  # a process that waits for a core may be between the two in one
    assert sum(trace.split.values()) == pytest.approx(trace.seconds, rel=0.001)
    (interval,) = read_rank_history(tmp_path / "run").intervals
    shares = {name: column[0] / interval.step_seconds[0] for name, column in interval.split.items()}
    assert sum(shares.values()) == pytest.approx(1.0, abs=0.03)
    for phase in least:
        assert shares[phase] == pytest.approx(trace.share(phase), abs=0.1), phase  # of other updates, too
