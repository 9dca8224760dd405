"""The tables that user code logged, cut to what fits a page.

media/errors-00000300.json --> columns, rows of text, what is cut
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from lockstep.core.formatting import counted
from lockstep.report.logged_files import content, newest_of_each
from lockstep.report.run_data import LoggedFile, RunData

_MOST_ROWS, _MOST_COLUMNS = 20, 20
_LONGEST_CELL = 200


@dataclass(frozen=True, slots=True)
class ShownTable:
    """A table, or the part of it that a page shows.

    Attributes:
        columns: Each name, and whether all of the column's cells are numbers or empty.
        cut: What isn't shown, and where it is; empty if all is.
    """

    step: int
    name: str
    columns: list[tuple[str, bool]]
    rows: list[list[str]]
    cut: str


def logged_tables(run: RunData) -> list[ShownTable]:
    """Return the last table of each name, as far as they can be read."""
    shown = (_table(run, table) for table in newest_of_each(run.tables))
    return [table for table in shown if table is not None]


def _table(run: RunData, file: LoggedFile) -> ShownTable | None:
    try:
        record = json.loads(content(run, file))
        columns, rows, left_out = record["columns"], record["rows"], record.get("left_out", 0)
        if not columns or any(len(row) != len(columns) for row in rows):
            return None
        kept = [row[:_MOST_COLUMNS] for row in rows[:_MOST_ROWS]]
        numeric = [all(_is_number(row[at]) for row in kept) for at in range(min(len(columns), _MOST_COLUMNS))]
        more = (len(rows) - len(kept) + left_out, len(columns) - len(numeric))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    named = [(_text(name), is_numeric) for name, is_numeric in zip(columns, numeric, strict=False)]
    texts = [[_text(cell) for cell in row] for row in kept]
    return ShownTable(file.step, file.name, named, texts, _cut(*more, left_out, file.file))


def _cut(rows: int, columns: int, left_out: int, file: str) -> str:
    parts = [counted(number, what) for number, what in ((rows, "row"), (columns, "column")) if number > 0]
    if not parts:
        return ""
    lost = f", but for {counted(left_out, 'row')} that the run didn't keep" if left_out else ""
    return f"{' and '.join(parts)} more: all are in {file}{lost}."


def _is_number(cell: Any) -> bool:
    return cell is None or (isinstance(cell, int | float) and not isinstance(cell, bool))


def _text(cell: Any) -> str:
    text = "" if cell is None else f"{cell:.6g}" if isinstance(cell, float) else str(cell)
    return text if len(text) <= _LONGEST_CELL else text[: _LONGEST_CELL - 1] + "…"
