"""Ranks in a report: a slow one stands out, an update's time is divided, what wasn't measured isn't drawn."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from kit.pages import interval, make_run, page_of, resumed, write_intervals

from lockstep.report.charts import Marks
from lockstep.report.rank_charts import filled_charts, gauge_charts, straggler_rows
from lockstep.report.rank_history import RankHistory, read_rank_history

STEPS = range(10, 101, 10)


def history(where: Path, *lines: dict[str, object]) -> RankHistory:
    write_intervals(where, lines)
    return read_rank_history(where)


def test_a_slow_rank_is_one_dark_row_of_the_heat_map(tmp_path: Path) -> None:
    ranks = history(tmp_path, *(interval(step, ranks=8, slow=5 if step > 50 else None) for step in STEPS))
    heat = filled_charts(ranks, 0, 100, Marks())[0]
    assert heat.title == "Time of an update by rank, without waiting for others"
    assert heat.finding == "Slowest: rank 5, 63.2 ms an update; median rank 48.2 ms"
    dark = dict(heat.fills)["h5"]
    assert dark == "M500.0 130H1000.0V155H500.0z"  # the sixth of eight rows of 26 pixels, its second half
    assert [row[0] for row in heat.rows] == ["Ranks", *map(str, range(8))]
    assert heat.rows[6] == ["5", "63.2 ms", "5", "63.2 ms"]
    assert straggler_rows(ranks)[1:] == [["5", "a", "5 of 10", "1.6x", "backward"]]


def test_hundreds_of_ranks_share_rows_and_none_is_hidden_by_the_others(tmp_path: Path) -> None:
    ranks = history(tmp_path, *(interval(step, ranks=500, slow=317) for step in STEPS))
    heat = filled_charts(ranks, 0, 100, Marks())[0]
    assert heat.plot_height == 32 * 14
    assert dict(heat.fills)["h5"].count("M") == 1
    (group,) = [row for row in heat.rows[1:] if row[2] == "317"]
    first, last = map(int, group[0].split("-"))
    assert first <= 317 <= last
    assert "A row has a group of ranks, with the slowest of them." in heat.note


def test_the_phases_are_stacked_to_the_time_of_an_update(tmp_path: Path) -> None:
    ranks = history(tmp_path, *(interval(step, data=0.05 if step > 50 else 0.001) for step in STEPS))
    areas = filled_charts(ranks, 0, 100, Marks())[1]
    assert areas.finding == "Mostly backward: 40 %"
    assert [text.split()[0] for _, text in areas.legend] == [
        *("forward", "backward", "optimizer", "communication", "data", "host")
    ]
    assert areas.rows[1] == ["10", "15", "30", "2", "3", "1", "0.2"]
    assert areas.rows[-1] == ["100", "15", "30", "2", "3", "50", "0.2"]
    top = [float(y) for y in re.findall(r"[ML][\d.]+ ([\d.]+)", areas.fills[-1][1])]
    by_label = {label: place for place, label in areas.labels}
    pixels = (by_label["0"] - by_label["40"]) / 40  # of a millisecond
    assert (areas.plot_height - min(top)) / pixels == pytest.approx(100.2, rel=0.01)


def test_memory_and_use_of_gpus_are_drawn_over_ranks(tmp_path: Path) -> None:
    memory, gpus = gauge_charts(history(tmp_path, *(interval(step, ranks=4) for step in STEPS)), 0, 100, Marks())
    assert (memory.title, memory.finding) == ("Memory by rank, MiB", "Most: 268 MiB (memory resident)")
    assert [(series.name, series.values[0]) for series in memory.series] == [("max", 268), ("mean", 262), ("min", 256)]
    assert gpus.finding == "Most: 90.0 (utilization)"
    alone = gauge_charts(history(tmp_path, *(interval(step, ranks=1) for step in STEPS)), 0, 100, Marks())
    assert [series.name for series in alone[0].series] == ["rank 0"]


def test_without_a_split_the_heat_map_has_whole_updates(tmp_path: Path) -> None:
    lines = [{**interval(step), "split": {}, "gauges": {}, "step_seconds": [0.05, 0.07]} for step in STEPS]
    (heat,) = filled_charts(history(tmp_path, *lines), 0, 100, Marks())
    assert (heat.title, heat.finding) == (
        "Time of an update by rank",
        "Slowest: rank 1, 70 ms an update; median rank 50 ms",
    )


@pytest.mark.parametrize(
    "lines", [[], [{**interval(10), "updates": [0, 0], "step_seconds": [None, None], "split": {}}]]
)
def test_what_was_not_measured_is_not_drawn(tmp_path: Path, lines: list[dict[str, object]]) -> None:
    assert filled_charts(history(tmp_path, *lines), 0, 100, Marks()) == []


def test_a_rank_that_joins_later_or_measures_nothing_leaves_empty_cells(tmp_path: Path) -> None:
    late = {**interval(10), "step_seconds": [0.05, None], "updates": [10, 0]}
    late["split"] = {name: [values[0], None] for name, values in late["split"].items()}
    heat = filled_charts(history(tmp_path, late, interval(20, slow=1)), 0, 20, Marks())[0]
    cells = "".join(path for _, path in heat.fills)
    assert "M0.0 26" not in cells
    assert "M500.0 26H1000.0" in cells


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
        "Time of an update by rank, without waiting for others",
        "Time of an update by phase, ms",
        "Memory by rank, MiB",
        "Use of GPUs, %",
    ]
    assert page.count("rollback") == len(titles) + 1  # and in the key
    assert "Rank host intervals time phase 1 a 10 of 10 1.6x backward" in page.text
    assert "A line of ranks.jsonl can't be read, and left out." in page.text
    bands = {
        (attributes["x"], attributes["width"])
        for _, attributes in page.elements
        if attributes.get("class") == "rollback" and "x" in attributes
    }
    assert bands == {("60.00%", "20.00%")}
    captions = [tag for tag, _ in page.elements if tag == "caption"]
    assert len(captions) == len(titles) + 2  # a table for each chart, and those of the slow ranks and of restarts
