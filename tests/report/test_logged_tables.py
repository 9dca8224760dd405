"""Tables that user code logged, in the report: the last of each name, cut to what fits a page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from kit.pages import Happening, Page, make_run, page_of

from lockstep.core.media import LoggedTable
from lockstep.monitor.metric_log import Logged
from lockstep.report import write_report
from lockstep.report.page import MOST, logged_tables
from lockstep.report.run_data import read_run

SCRIPT = "<script>alert(1)</script>"


def shown(step: int, **tables: LoggedTable) -> Happening:
    return lambda log: log.logged(step, Logged(media=tables))


def of(rows: int, columns: int = 1, left_out: int = 0) -> LoggedTable:
    return LoggedTable(tuple(f"c{n}" for n in range(columns)), ((1,) * columns,) * rows, left_out)


def test_the_last_table_of_each_name_is_in_the_page(tmp_path: Path) -> None:
    last = LoggedTable(("word", "hits", SCRIPT), (("<b>", 2024, 0.123456789), (None, None, 1e-9), (True, 3, SCRIPT)))
    run = make_run(tmp_path, happenings={3: [shown(3, errors=of(1))], 9: [shown(9, errors=last, **{SCRIPT: of(1)})]})
    first, second = logged_tables(read_run(run))
    assert (first.step, first.name, first.cut) == (9, "errors", "")
    assert first.columns == [("word", False), ("hits", True), (SCRIPT, False)]
    assert first.rows == [["<b>", "2024", "0.123457"], ["", "", "1e-09"], ["True", "3", SCRIPT]]
    page = page_of(run)
    assert f"step 9 · errors errors at step 9 word hits {SCRIPT} <b> 2024 0.123457" in page.text
    assert f"step 9 · {second.name}" in page.text
    assert "The last of each name; others in media/: 1." in page.text
    assert len(page.scripts) == 1, "the page's own"
    regions = [attributes["aria-label"] for _, attributes in page.elements if attributes.get("role") == "region"]
    assert {"errors at step 9", f"{SCRIPT} at step 9"} <= set(regions)


@pytest.mark.parametrize(
    ("table", "cut"),
    [
        (of(20, 20), ""),
        (of(21), "Shown in part: 21 rows, 1 columns; the run kept 21 rows, in media/t-00000003.json."),
        (of(1, 22), "Shown in part: 1 rows, 22 columns; the run kept 1 rows, in media/t-00000003.json."),
        (
            of(30, 21, left_out=5),
            "Shown in part: 35 rows, 21 columns; the run kept 30 rows, in media/t-00000003.json.",
        ),
    ],
)
def test_a_large_table_is_cut_and_says_so(tmp_path: Path, table: LoggedTable, cut: str) -> None:
    run = make_run(tmp_path, happenings={3: [shown(3, t=table)]})
    (small,) = logged_tables(read_run(run))
    assert (len(small.columns) <= 20, len(small.rows) <= 20, small.cut) == (True, True, cut)
    assert cut in page_of(run).text


def test_a_page_has_so_many_tables_and_stays_small(tmp_path: Path) -> None:
    large = LoggedTable(tuple(f"column {n}" for n in range(100)), (("x" * 1000,) * 100,) * 100)
    run = make_run(tmp_path, happenings={3: [shown(3, **{f"table {n}": large for n in range(MOST + 5)})]})
    assert len(logged_tables(read_run(run))) == MOST
    assert write_report(run).stat().st_size < 2_000_000


@pytest.mark.parametrize(
    "damage",
    ["gone", '{"colu', "[]", '{"columns": 5, "rows": []}', '{"columns": ["a"], "rows": [[1, 2]]}',
     '{"columns": ["a"], "rows": [7]}', '{"columns": ["a"], "rows": [[1]], "left_out": "x"}', "outside"],
)  # fmt: skip
def test_a_file_that_is_no_table_of_the_run_is_left_out(tmp_path: Path, damage: str) -> None:
    run = make_run(tmp_path, happenings={3: [shown(3, a=of(1), b=of(1))]})
    (file,) = (run / "media").glob("a-*")
    if damage == "outside":
        (tmp_path / "a.json").write_text(file.read_text())
        events = (run / "events.jsonl").read_text().replace(f"media/{file.name}", "../a.json")
        (run / "events.jsonl").write_text(events)
    elif damage == "gone":
        file.unlink()
    else:
        file.write_text(damage)
    assert [table.name for table in logged_tables(read_run(run))] == ["b"]
    assert isinstance(page_of(run), Page)


def test_cells_of_any_json_kind_are_text(tmp_path: Path) -> None:
    run = make_run(tmp_path, happenings={3: [shown(3, a=of(1))]})
    (file,) = (run / "media").glob("a-*")
    file.write_text(json.dumps({"columns": [1, None], "rows": [[[1], {"a": 2}]]}))
    (table,) = logged_tables(read_run(run))
    assert table.rows == [["[1]", "{'a': 2}"]]
