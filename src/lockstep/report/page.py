"""A finished, stopped or broken run as one page to read: RUN/report.html. Needs no torch."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lockstep import __version__
from lockstep.core.errors import RunFailed
from lockstep.core.files import read_bounded
from lockstep.core.near_runs import not_a_run
from lockstep.core.secrets import hidden_setting, without_secrets
from lockstep.monitor.folder import is_run, refuse_escaping_links
from lockstep.monitor.media import MEDIA
from lockstep.report.charts import Marks, draw
from lockstep.report.curves import MAX_LOGGED, charts, rank_charts, straggler_rows
from lockstep.report.facts import (
    as_text,
    bad_numbers,
    date,
    environment,
    evaluation_table,
    events,
    facts,
    flaws,
    large_figures,
    left_out,
    restart_table,
    restarts,
    state,
)
from lockstep.report.html import render, write_page
from lockstep.report.rank_history import read_rank_history
from lockstep.report.run_data import LoggedFile, RunData, is_number, read_run

REPORT = "report.html"

_SAMPLES = 6
_LONGEST_CONFIG = 100_000
_MOST_ROWS, _MOST_COLUMNS = 20, 20
_LONGEST_CELL = 200
_MOST_IMAGE_BYTES = 1 << 20
_BEGIN, _END = b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"
MOST = 12
"""Images in a page at most, and tables."""
MOST_BYTES = 1 << 25
"""Bytes of a table's file at most."""


def write_report(run: Path, output: Path | None = None, ended: str = "") -> Path:
    """Write RUN/report.html, or `output`, and return its path. The page lists what is damaged in the run.

    Args:
        ended: How the run ended, in a sentence; empty if that isn't known, or not unusual.

    Raises:
        ConfigError: `run` is not a run's folder.
        RunFailed: A file can't be read or written.
    """
    folder = Path(os.path.abspath(run))
    check_run(folder)
    try:
        text = compose(read_run(folder), ended)
    except OSError as error:
        raise RunFailed(f"can't read {error.filename or folder}: {error.strerror or error}") from error
    return write_page(output or folder / REPORT, text)


def compose(run: RunData, ended: str = "") -> str:
    """Return the page. Arguments as of `write_report`."""
    drawn, images, tables = charts(run), thumbnails(run), logged_tables(run)
    ranks = read_rank_history(run.folder)
    span = (drawn[0].first, drawn[0].last, drawn[0].marks) if drawn else (0, 1, Marks())
    samples = np.unique(np.linspace(0, len(run.texts) - 1, min(_SAMPLES, len(run.texts))).round().astype(int))
    created = date(run.environment.get("created"))
    now = date(time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    return render(
        "report.html",
        title=f"{run.folder.name}: training report",
        kicker="Training report",
        heading=run.folder.name,
        standfirst=as_text(run.config.get("description")),
        state=state(run),
        byline=f" · {'last started' if run.num_attempts > 1 else 'started'} {created}" if created else "",
        flaws=[*flaws(run, ended), *ranks.flaws],
        figures=large_figures(run),
        facts=facts(run),
        charts=drawn,
        draw=draw,
        of_ranks=rank_charts(ranks, *span),
        stragglers=straggler_rows(ranks),
        marks=drawn[0].marks if drawn else None,
        has_gap=any(not series.finite.all() for chart in drawn for series in chart.series),
        hidden_values=len(run.logged) - MAX_LOGGED,
        evaluations=evaluation_table(run),
        events=[*events(run), *bad_numbers(run), *left_out(run.left_out)],
        restarts=restart_table(restarts(run)),
        samples=[run.texts[index] for index in samples],
        images=images,
        images_remark=remark(run.images, images),
        tables=tables,
        tables_remark=remark(run.tables, tables),
        hidden_samples=len(run.texts) - len(samples),
        config=[_config_line(line) for line in run.config_text[: _LONGEST_CONFIG + 1].rstrip().splitlines()],
        config_is_cut=len(run.config_text) > _LONGEST_CONFIG,
        environment=environment(run.environment),
        footer=f"{run.folder}. Made by Lockstep {__version__} on {now}.",
    )


def _config_line(line: str) -> tuple[str, str]:
    key, colon, value = line.partition(": ")
    text = f"{key}{colon}{hidden_setting(key.strip(), value)}" if colon else without_secrets(line)
    name, colon, rest = text.partition(":")
    return (name + colon, rest) if colon else ("", text)


def check_run(folder: Path) -> None:
    """Raise ConfigError if it isn't a run's folder, or a link in it leads out."""
    if not is_run(folder):
        raise not_a_run(folder)
    refuse_escaping_links(folder)


@dataclass(frozen=True, slots=True)
class ShownTable:
    """The part of a table that a page shows.

    Attributes:
        columns: Each name, and whether all of the column's cells are numbers or empty.
        cut: What isn't shown; empty if all is.
    """

    step: int
    name: str
    columns: list[tuple[str, bool]]
    rows: list[list[str]]
    cut: str


def logged_tables(run: RunData) -> list[ShownTable]:
    """Return the last table of each name that can be read."""
    return [*filter(None, (_table(run, table) for table in newest_of_each(run.tables)))]


def _table(run: RunData, file: LoggedFile) -> ShownTable | None:
    try:
        record = json.loads(content(run, file))
        columns, rows, left_out = record["columns"], record["rows"], record.get("left_out", 0)
        if not columns or any(len(row) != len(columns) for row in rows):
            return None
        kept = [row[:_MOST_COLUMNS] for row in rows[:_MOST_ROWS]]
        numeric = [all(is_number(row[at]) for row in kept) for at in range(min(len(columns), _MOST_COLUMNS))]
        is_cut = len(kept) + len(numeric) < len(rows) + left_out + len(columns)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    named = [(_text(name), is_numeric) for name, is_numeric in zip(columns, numeric, strict=False)]
    texts = [[_text(cell) for cell in row] for row in kept]
    size = f"{len(rows) + left_out:,} rows, {len(columns):,} columns"
    cut = f"Shown in part: {size}; the run kept {len(rows):,} rows, in {file.file}."
    return ShownTable(file.step, file.name, named, texts, cut if is_cut else "")


def _text(cell: Any) -> str:
    text = "" if cell is None else f"{cell:.6g}" if isinstance(cell, float) else str(cell)
    return text if len(text) <= _LONGEST_CELL else text[: _LONGEST_CELL - 1] + "…"


@dataclass(frozen=True, slots=True)
class Thumbnail:
    """An image that the browser shows small; `source` is the PNG as a `data:` URL."""

    step: int
    name: str
    source: str


def thumbnails(run: RunData) -> list[Thumbnail]:
    """Return the last image of each name that can be read."""
    return [*filter(None, (_thumbnail(run, image) for image in newest_of_each(run.images)))]


def _thumbnail(run: RunData, image: LoggedFile) -> Thumbnail | None:
    try:
        data = content(run, image, _MOST_IMAGE_BYTES)
    except (OSError, ValueError):
        return None
    if not data.startswith(_BEGIN) or not data.endswith(_END):
        return None
    return Thumbnail(image.step, image.name, "data:image/png;base64," + base64.b64encode(data).decode())


def newest_of_each(files: Sequence[LoggedFile]) -> list[LoggedFile]:
    """Return the last file of each name, in the order of the names' first files, up to `MOST`."""
    return list({file.name: file for file in files}.values())[:MOST]


def content(run: RunData, file: LoggedFile, most: int = MOST_BYTES) -> bytes:
    """Return the bytes of a file. Raises OSError, and ValueError for a link or a file outside of MEDIA."""
    place = run.folder / file.file
    if place.is_symlink() or place.parent != run.folder / MEDIA:
        raise ValueError(f"{place} is not a file in {MEDIA}")
    return read_bounded(place, most)


def remark(files: Sequence[LoggedFile], shown: Sequence[Any]) -> str:
    """Return where the other files are; empty if all are shown."""
    others = len(files) - len(shown)
    return f"The last of each name; others in {MEDIA}/: {others:,}." if others else ""
