"""The clock's phases beside torch's profiler: both see the same forward, backward and data, within 3 % of an update."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

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
    begin, end = whole[0]["ts"], whole[-1]["ts"] + whole[-1]["dur"]
    seconds = dict.fromkeys(("forward", "backward", "data"), 0.0)
    for event in events:
        name = str(event.get("name")).removeprefix("mine/")
        if name in seconds and event["name"] != name and "dur" in event and begin <= event["ts"] < end:
            seconds[name] += event["dur"] / 1e6 / trace.updates
    assert seconds["forward"] > 0.03
    assert seconds["backward"] > 0.045
    assert seconds["data"] > 0.02
    margin = 0.03 * trace.seconds
    for phase, recorded in seconds.items():
        assert recorded <= trace.split[phase] + 1e-4, phase
        assert trace.split[phase] - recorded < margin, phase
    assert sum(trace.split.values()) == pytest.approx(trace.seconds, rel=0.001)
    (interval,) = read_rank_history(tmp_path / "run").intervals
    shares = {name: column[0] / interval.step_seconds[0] for name, column in interval.split.items()}
    assert sum(shares.values()) == pytest.approx(1.0, abs=0.03)
    for phase in seconds:
        assert shares[phase] == pytest.approx(trace.share(phase), abs=0.1), phase  # of other updates, too
