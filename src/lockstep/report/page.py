"""A finished, stopped or broken run as one page to read: RUN/report.html.

    read_run --> facts, charts --> report.html, which extends page.html --> one file, written atomically

Needs no torch.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np

from lockstep import __version__
from lockstep.core.errors import ConfigError, RunFailed
from lockstep.core.files import write_atomically
from lockstep.core.near_runs import did_you_mean_run
from lockstep.core.secrets import hidden_setting, without_secrets
from lockstep.monitor.folder import CONFIG, is_run, refuse_escaping_links
from lockstep.monitor.meter_files import RANKS
from lockstep.report import facts
from lockstep.report.charts import Marks, draw
from lockstep.report.curves import MAX_LOGGED, charts
from lockstep.report.html import render
from lockstep.report.logged_files import remark
from lockstep.report.logged_tables import logged_tables
from lockstep.report.rank_charts import draw_filled, filled_charts, gauge_charts, straggler_rows
from lockstep.report.rank_history import RankHistory, read_rank_history
from lockstep.report.restarts import restart_table, restarts
from lockstep.report.run_data import RunData, read_run
from lockstep.report.thumbnails import thumbnails

REPORT = "report.html"

_SAMPLES = 6
_LONGEST_CONFIG = 100_000
_NEAR_RUNS = 3


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
        flaws=[*facts.flaws(run, ended), *_flaws_of_ranks(ranks)],
        figures=facts.large_figures(run),
        facts=facts.facts(run),
        charts=drawn,
        draw=draw,
        filled=filled_charts(ranks, *span),
        gauges=gauge_charts(ranks, *span),
        stragglers=straggler_rows(ranks),
        draw_filled=draw_filled,
        marks=drawn[0].marks if drawn else None,
        has_gap=any(not series.finite.all() for chart in drawn for series in chart.series),
        hidden_values=len(run.logged) - MAX_LOGGED,
        evaluations=facts.evaluation_table(run),
        events=facts.events(run),
        restarts=restart_table(restarts(run), facts.MAX_LISTED),
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


def _flaws_of_ranks(ranks: RankHistory) -> list[str]:
    if not ranks.damaged:
        return []
    lines = "A line" if ranks.damaged == 1 else f"{ranks.damaged:,} lines"
    return [f"{lines} of {RANKS} can't be read, and left out."]


def _config_line(line: str) -> tuple[str, str]:
    """Return the key with its colon, and the rest, without secrets."""
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
