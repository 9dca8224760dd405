"""Ranks in a report: a slow one stands out, an update's time is divided, what wasn't measured isn't drawn."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from kit.pages import interval, make_run, page_of, resumed, write_intervals

from lockstep.report.charts import Chart, Marks
from lockstep.report.curves import rank_charts, straggler_rows
from lockstep.report.rank_history import RankHistory, read_rank_history

STEPS = range(10, 101, 10)


def history(where: Path, *lines: dict[str, object]) -> RankHistory:
    write_intervals(where, lines)
    return read_rank_history(where)


def charts(ranks: RankHistory) -> list[Chart]:
    return rank_charts(ranks, 0, 100, Marks())


def test_a_slow_rank_is_a_line_of_its_own(tmp_path: Path) -> None:
    times = charts(history(tmp_path, *(interval(step, ranks=4, slow=3 if step > 50 else None) for step in STEPS)))[0]
    assert times.title == "Time of an update by rank, without waiting for others, ms"
    assert times.finding == "Slowest: rank 3, 63.2 ms an update; median rank 48.2 ms"
    assert [(series.name, series.values[-1]) for series in times.series] == [
        *((f"rank {rank}", pytest.approx(48.2)) for rank in range(3)),
        ("rank 3", pytest.approx(78.2)),
    ]
    assert (times.first, times.last) == (0, 100)


def test_hundreds_of_ranks_are_three_lines_and_the_slowest_is_named(tmp_path: Path) -> None:
    ranks = history(tmp_path, *(interval(step, ranks=500, slow=317) for step in STEPS))
    times = charts(ranks)[0]
    assert times.finding.startswith("Slowest: rank 317, 78.2 ms an update")
    last = {series.name: series.values[-1] for series in times.series}
    assert last == pytest.approx({"slowest": 78.2, "median": 48.2, "fastest": 48.2})
    assert straggler_rows(ranks)[1:] == [["317", "a", "10 of 10", "1.6x", "backward"]]


def test_the_phases_of_an_update_are_lines(tmp_path: Path) -> None:
    ranks = history(tmp_path, *(interval(step, data=0.05 if step > 50 else 0.001) for step in STEPS))
    phases = charts(ranks)[1]
    assert phases.finding == "Mostly backward: 40 %"
    last = {series.name: series.values[-1] for series in phases.series}
    shown = {"data": 50, "forward": 15, "backward": 30, "optimizer": 2, "communication": 3}  # the host took too little
    assert last == pytest.approx(shown)


def test_memory_and_use_of_gpus_are_drawn_over_ranks(tmp_path: Path) -> None:
    memory, gpus = charts(history(tmp_path, *(interval(step, ranks=4) for step in STEPS)))[2:]
    assert (memory.title, memory.finding) == ("Memory by rank, MiB", "Most: 268 MiB (memory resident)")
    assert [(series.name, series.values[0]) for series in memory.series] == [("max", 268), ("mean", 262), ("min", 256)]
    assert gpus.finding == "Most: 90.0 (utilization)"
    alone = charts(history(tmp_path, *(interval(step, ranks=1) for step in STEPS)))
    assert [[series.name for series in chart.series] for chart in alone[1:]] == [["rank 0"], ["rank 0"]]


def test_without_a_split_whole_updates_are_drawn(tmp_path: Path) -> None:
    lines = [{**interval(step), "split": {}, "gauges": {}, "step_seconds": [0.05, 0.07]} for step in STEPS]
    (times,) = charts(history(tmp_path, *lines))
    assert (times.title, times.finding) == (
        "Time of an update by rank, ms",
        "Slowest: rank 1, 70 ms an update; median rank 50 ms",
    )


@pytest.mark.parametrize(
    "lines", [[], [{**interval(10), "updates": [0, 0], "step_seconds": [None, None], "split": {}, "gauges": {}}]]
)
def test_what_was_not_measured_is_not_drawn(tmp_path: Path, lines: list[dict[str, object]]) -> None:
    assert charts(history(tmp_path, *lines)) == []


def test_a_rank_that_joins_later_or_measures_nothing_leaves_a_gap(tmp_path: Path) -> None:
    late = {**interval(10), "step_seconds": [0.05, None], "updates": [10, 0]}
    late["split"] = {name: [values[0], None] for name, values in late["split"].items()}
    times = charts(history(tmp_path, late, interval(20, slow=1)))[0]
    assert [np.isfinite(series.values).tolist() for series in times.series] == [[True, True], [False, True]]


# --- the reader ------------------------------------------------------------------------------------------------------


def test_of_a_very_long_run_intervals_are_kept_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.report.rank_history._MOST_INTERVALS", 100)
    steps = history(tmp_path, *(interval(step) for step in range(1, 1001))).steps
    assert 50 <= len(steps) <= 101
    assert (steps[0], len(np.unique(np.diff(steps)))) == (1, 1)
    assert steps[-1] > 980


def test_lines_that_no_run_writes_are_counted(tmp_path: Path) -> None:
    good = interval(10)
    bad = [
        {**good, "ranks": [0, 10**9]},
        {**good, "ranks": [-1, 0]},
        {**good, "step": -5},
        {**good, "step": 10**400},
        {**good, "split": [1]},
        {**good, "stragglers": [{"rank": "x"}]},
        {**good, "updates": [1]},
    ]
    ranks = history(tmp_path, *bad, {**good, "step_seconds": [1e300, True]})
    assert (len(ranks.intervals), ranks.damaged) == (1, 7)
    assert np.isnan(ranks.intervals[0].step_seconds).all()


# --- the page --------------------------------------------------------------------------------------------------------


def test_the_page_has_the_ranks_with_their_table_and_what_was_rolled_back(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=100, happenings={60: [resumed(60, 2)]})
    write_intervals(run, [interval(step, slow=1) for step in STEPS])
    with (run / "ranks.jsonl").open("a") as file:
        file.write("{\n")
    (run / "earlier" / "1").mkdir(parents=True)
    lines = [json.dumps({"step": step, "loss": 1.0}) for step in range(61, 81)]
    (run / "earlier" / "1" / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    page = page_of(run)
    titles = [title.partition(".")[0] for title in page.charts()]
    assert titles[-4:] == [
        "Time of an update by rank, without waiting for others, ms",
        "Time of an update by phase, mean over ranks, ms",
        "Memory by rank, MiB",
        "Use of GPUs, %",
    ]
    assert page.count("rollback") == len(titles) + 1  # and in the key
    assert "Rank host intervals time phase 1 a 10 of 10 1.6x backward" in page.text
    assert "1 line of ranks.jsonl can't be read." in page.text
    bands = {
        (attributes["x"], attributes["width"])
        for _, attributes in page.elements
        if attributes.get("class") == "rollback" and "x" in attributes
    }
    assert bands == {("60.00%", "20.00%")}
    captions = [tag for tag, _ in page.elements if tag == "caption"]
    assert len(captions) == len(titles) + 2  # a table for each chart, and those of the slow ranks and of restarts
