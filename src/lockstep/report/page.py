"""A finished, stopped or broken run as one page to read: RUN/report.html.

    read_run --> facts, charts --> report.html, which extends page.html --> one file, written atomically

Needs no torch.
"""

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
from lockstep.core.errors import ConfigError, RunFailed
from lockstep.core.files import read_bounded, write_atomically
from lockstep.core.formatting import counted
from lockstep.core.near_runs import did_you_mean_run
from lockstep.core.secrets import hidden_setting, without_secrets
from lockstep.monitor.folder import CONFIG, is_run, refuse_escaping_links
from lockstep.monitor.media import MEDIA
from lockstep.monitor.rank_meters import RANKS
from lockstep.report import facts
from lockstep.report.charts import Marks, draw
from lockstep.report.curves import MAX_LOGGED, charts, rank_charts, straggler_rows
from lockstep.report.html import render
from lockstep.report.rank_history import read_rank_history
from lockstep.report.run_data import LoggedFile, RunData, read_run

REPORT = "report.html"

_SAMPLES = 6
_LONGEST_CONFIG = 100_000
_NEAR_RUNS = 3


_MOST_ROWS, _MOST_COLUMNS = 20, 20
_LONGEST_CELL = 200
_SMALLEST, _SIDE = 96, 256  # pixels on the screen, to which images are enlarged or shrunk
_MOST_IMAGE_BYTES = 1 << 20
_BEGIN, _END = b"\x89PNG\r\n\x1a\n", b"IEND\xaeB`\x82"
MOST = 12
"""Images in a page at most, and tables."""
MOST_BYTES = 1 << 25
"""Bytes of a table's file at most."""


def write_report(run: Path, output: Path | None = None, ended: str = "") -> Path:
    """Write RUN/report.html, or `output`, and return its path. The page lists what is damaged in the run.

    Args:
        ended: How the run ended, as a sentence; empty if that isn't known, or not unusual.

    Raises:
        RunFailed: `run` is not a run's folder, or the system refuses to read or write a file.
    """
    folder = Path(os.path.abspath(run))
    target = Path(os.path.abspath(output or folder / REPORT))
    check_run(folder)
    try:
        text = compose(read_run(folder), ended)
    except OSError as error:
        raise RunFailed(f"can't read {error.filename or folder}: {error.strerror or error}") from error
    try:
        write_atomically(target, text)
    except OSError as error:
        raise RunFailed(f"can't write {target}: {error.strerror or error}") from error
    return target


def compose(run: RunData, ended: str = "") -> str:
    """Return the page. Arguments as of `write_report`."""
    drawn, images, tables = charts(run), thumbnails(run), logged_tables(run)
    ranks = read_rank_history(run.folder)
    rank_flaws = [f"{counted(ranks.damaged, 'line')} of {RANKS} can't be read, and left out."] if ranks.damaged else []
    span = (drawn[0].first, drawn[0].last, drawn[0].marks) if drawn else (0, 1, Marks())
    samples = np.unique(np.linspace(0, len(run.texts) - 1, min(_SAMPLES, len(run.texts))).round().astype(int))
    created = facts.date(run.environment.get("created"))
    now = facts.date(time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    return render(
        "report.html",
        title=f"{run.folder.name}: training report",
        kicker="Training report",
        heading=run.folder.name,
        standfirst=facts.as_text(run.config.get("description")),
        state=facts.state(run),
        byline=f" · {'last started' if run.num_attempts > 1 else 'started'} {created}" if created else "",
        flaws=[*facts.flaws(run, ended), *rank_flaws],
        figures=facts.large_figures(run),
        facts=facts.facts(run),
        charts=drawn,
        draw=draw,
        of_ranks=rank_charts(ranks, *span),
        stragglers=straggler_rows(ranks),
        marks=drawn[0].marks if drawn else None,
        has_gap=any(not series.finite.all() for chart in drawn for series in chart.series),
        hidden_values=len(run.logged) - MAX_LOGGED,
        evaluations=facts.evaluation_table(run),
        events=[*facts.events(run), *facts.bad_numbers(run), *facts.left_out(run.left_out)],
        restarts=facts.restart_table(facts.restarts(run)),
        samples=[run.texts[index] for index in samples],
        images=images,
        images_remark=remark(run.images, images),
        tables=tables,
        tables_remark=remark(run.tables, tables),
        hidden_samples=len(run.texts) - len(samples),
        config=[_config_line(line) for line in run.config_text[: _LONGEST_CONFIG + 1].rstrip().splitlines()],
        config_is_cut=len(run.config_text) > _LONGEST_CONFIG,
        environment=facts.environment(run.environment),
        footer=f"{run.folder}. Made by Lockstep {__version__} on {now}.",
    )


def _config_line(line: str) -> tuple[str, str]:
    key, colon, value = line.partition(": ")
    text = f"{key}{colon}{hidden_setting(key.strip(), value)}" if colon else without_secrets(line)
    name, colon, rest = text.partition(":")
    return (name + colon, rest) if colon else ("", text)


def check_run(folder: Path) -> None:
    """Raise RunFailed, with the run that may be meant, if it is not a run's folder; ConfigError if it isn't there."""
    if is_run(folder):
        refuse_escaping_links(folder)
        return
    if not folder.exists():
        raise ConfigError(f"there is no folder {folder}{did_you_mean_run(folder)}")
    if not folder.is_dir():
        near = f"; its run is {folder.parent}" if is_run(folder.parent) else ""
        raise RunFailed(f"{folder} is a file, not the folder of a run{near}")
    runs = sorted((entry for entry in folder.iterdir() if is_run(entry)), key=lambda entry: entry.stat().st_mtime)
    near = f"; the newest runs in it are {', '.join(str(entry) for entry in runs[-_NEAR_RUNS:])}" if runs else ""
    raise RunFailed(f"{folder} is not the folder of a run: it has no {CONFIG}{near}")


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
        is_cut = len(kept) + len(numeric) < len(rows) + left_out + len(columns)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    named = [(_text(name), is_numeric) for name, is_numeric in zip(columns, numeric, strict=False)]
    texts = [[_text(cell) for cell in row] for row in kept]
    size = f"{counted(len(rows) + left_out, 'row')} and {counted(len(columns), 'column')}"
    lost = f", but for {counted(left_out, 'row')} that the run didn't keep" if left_out else ""
    return ShownTable(file.step, file.name, named, texts, f"{size}: all are in {file.file}{lost}." if is_cut else "")


def _is_number(cell: Any) -> bool:
    return cell is None or (isinstance(cell, int | float) and not isinstance(cell, bool))


def _text(cell: Any) -> str:
    text = "" if cell is None else f"{cell:.6g}" if isinstance(cell, float) else str(cell)
    return text if len(text) <= _LONGEST_CELL else text[: _LONGEST_CELL - 1] + "…"


@dataclass(frozen=True, slots=True)
class Thumbnail:
    """An image that the browser shows small.

    Attributes:
        source: The PNG as an address of the scheme `data`.
        width, height: Pixels on the screen.
        size: Of the whole image, such as `640 x 480`.
    """

    step: int
    name: str
    source: str
    width: int
    height: int
    size: str


def thumbnails(run: RunData) -> list[Thumbnail]:
    """Return the last image of each name, as far as they can be read."""
    shown = (_thumbnail(run, image) for image in newest_of_each(run.images))
    return [thumbnail for thumbnail in shown if thumbnail is not None]


def _thumbnail(run: RunData, image: LoggedFile) -> Thumbnail | None:
    try:
        data = content(run, image, _MOST_IMAGE_BYTES)
    except (OSError, ValueError):
        return None
    if not data.startswith(_BEGIN) or not data.endswith(_END):
        return None
    width, height = (int.from_bytes(data[at : at + 4]) for at in (16, 20))
    side = max(width, height, 1)
    scale = min(max(1, round(_SMALLEST / side)), _SIDE / side)
    source = "data:image/png;base64," + base64.b64encode(data).decode()
    return Thumbnail(image.step, image.name, source, round(width * scale), round(height * scale), f"{width} x {height}")


def newest_of_each(files: Sequence[LoggedFile]) -> list[LoggedFile]:
    """Return the last file of each name, in the order in which names first came, up to `MOST`."""
    return list({file.name: file for file in files}.values())[:MOST]


def content(run: RunData, file: LoggedFile, most: int = MOST_BYTES) -> bytes:
    """Return the bytes of a file. Raises OSError, and ValueError for a link or one outside of the run's folder."""
    place = run.folder / file.file
    if place.is_symlink() or place.parent != run.folder / MEDIA:
        raise ValueError(f"{place} is not a file in {MEDIA}")
    return read_bounded(place, most)


def remark(files: Sequence[LoggedFile], shown: Sequence[Any]) -> str:
    """Return where the other files are; empty if all are shown."""
    others = len(files) - len(shown)
    return f"The last of each name; {others:,} more {'is' if others == 1 else 'are'} in {MEDIA}/." if others else ""
