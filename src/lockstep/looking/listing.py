"""Lists the runs of a folder, for `lockstep ls`: state and progress, and below why it ended."""

from __future__ import annotations

import itertools
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from lockstep.core import formatting
from lockstep.core.files import changed
from lockstep.core.terminal import plain_line
from lockstep.looking.states import RunState, status_of
from lockstep.monitor.attempts import read_attempts
from lockstep.monitor.events import EVENTS
from lockstep.monitor.folder import CONFIG, ENVIRONMENT, METRICS, SUMMARY, is_run
from lockstep.monitor.goodput import goodput, step_reached
from lockstep.monitor.jsonl import as_number, read_object, read_tail
from lockstep.monitor.rank_meters import LIVE

RUNS = "runs"
"""The default folder of runs."""
_MOST_ENTRIES = 20_000  # of a folder
_TAIL = 1 << 12
_HEAD = ("state", "run", "step", "loss", "speed", "age", "host")
_RIGHT = ("step", "loss", "speed", "age")
_DISPENSABLE = ("host", "speed", "age", "loss", "step")
"""Columns that a narrow terminal lacks, in this order: a number that is cut would be another number."""
_SHORT_NAME = 12  # characters of a run's name that stay


@dataclass(frozen=True, slots=True)
class ListedRun:
    """A run in a list. None: unknown.

    Attributes:
        run: Its folder.
        steps: To do; `share` of it is done, from 0 to 1.
        speed: Tokens or samples (`unit`) per second.
        started: When it was started last (Unix time); `changed` when it last wrote something.
        note: Why it ended, or what is unusual; may be empty.
    """

    run: str
    state: RunState
    step: int | None
    steps: int | None
    share: float | None
    loss: float | None
    speed: float | None
    unit: str
    started: float | None
    changed: float
    host: str
    hosts: int
    note: str
    goodput: float | None = None

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "state": self.state.value}


def list_runs(folders: Sequence[Path]) -> list[ListedRun]:
    """Return the runs in these folders and the folders in them, the last started first."""
    runs = {os.path.realpath(run): run for folder in folders for run in runs_in(folder)}
    rows = map(listed, runs.values())
    return sorted(rows, key=lambda row: row.changed if row.started is None else row.started, reverse=True)


def runs_in(folder: Path, depth: int = 2) -> Iterator[Path]:
    """Yield the folder if it is a run, else the runs in it and in its folders, by name: seed-2 before seed-10."""
    with suppress(OSError):
        if is_run(folder):
            yield folder
            return
        if depth == 0:
            return
        with os.scandir(folder) as entries:
            inside = [entry for entry in itertools.islice(entries, _MOST_ENTRIES) if not entry.name.startswith(".")]
        for entry in sorted(inside, key=lambda entry: (_natural(entry.name), entry.name)):
            if entry.is_dir():
                yield from runs_in(Path(entry.path), depth - 1)


def _natural(name: str) -> list[tuple[str, int]]:
    return [(text, int(digits or -1)) for text, digits in re.findall(r"([^0-9]*)([0-9]{0,18})", name)]


def listed(run: Path) -> ListedRun:
    """Return what the files of a run show. Never raises OSError."""
    status = status_of(run)
    records = read_tail(run / METRICS, _TAIL)
    last = records[-1] if records else {}
    trained: Mapping[str, Any] = next((each for each in reversed(records) if each.get("kept") is not False), {})
    summary, live, environment = (read_object(run / name) for name in (SUMMARY, LIVE, ENVIRONMENT))
    step = max(as_number(summary.get("steps"), -1), as_number(last.get("step"), -1), step_reached(run) or -1)
    attempts = read_attempts(run)
    wanted = as_number(attempts[-1].facts.get("steps"), 0.0) if attempts else 0.0
    share = 1.0 if summary else min(1.0, max(step, 0) / wanted) if wanted > 0 else None
    tokens, samples = (as_number(last.get(f"{name}_per_second")) for name in ("tokens", "samples"))
    speed, name = (tokens, "tokens") if tokens > samples else (samples, "samples")
    host = environment.get("host")
    return ListedRun(
        run=str(run),
        state=status.state,
        step=int(step) if step >= 0 else None,
        steps=int(wanted or as_number(summary.get("steps"), 0.0)) or None,
        share=share,
        loss=_known(as_number(trained.get("loss"))),
        speed=_known(speed) if speed > 0 else None,
        unit=name,
        started=_moment(environment.get("created")),
        changed=changed(run / METRICS, run / EVENTS, run / LIVE, run / ENVIRONMENT, run / SUMMARY, run / CONFIG),
        host=host if isinstance(host, str) else "",
        hosts=max(1, len(_hosts(live))),
        note=status.note,
        goodput=useful.share if (useful := goodput(run)) is not None and math.isfinite(useful.share) else None,
    )


def _hosts(live: Mapping[str, Any]) -> set[str]:
    ranks = live.get("ranks")
    return {str(rank.get("host")) for rank in ranks if isinstance(rank, dict)} if isinstance(ranks, list) else set()


def _moment(created: object) -> float | None:
    try:
        return datetime.fromisoformat(created).timestamp() if isinstance(created, str) else None
    except (ValueError, OverflowError, OSError):
        return None


def _known(value: float) -> float | None:
    return value if math.isfinite(value) else None


# --- text -----------------------------------------------------------------------------------------------------------


def describe(rows: Sequence[ListedRun], width: int | None, now: float | None = None) -> str:
    """Return a table of at most `width` columns; None: for a file, nothing is cut."""
    if not rows:
        return "no runs"
    moment = time.time() if now is None else now
    cells = [_HEAD, *(_cells(row, moment) for row in rows)]
    widths = {name: max(len(row[column]) for row in cells) for column, name in enumerate(_HEAD)}
    if width is not None:
        _fit(widths, width)
    lines = []
    for row, texts in itertools.zip_longest([None, *rows], cells):
        shown = ((text, widths[name], name) for text, name in zip(texts, _HEAD, strict=True) if name in widths)
        line = "  ".join(_padded(*cell) for cell in shown).rstrip()
        lines.append(line if width is None else line[:width])
        if row is not None and row.note:
            note = f"  {plain_line(row.note)}"
            lines.append(note if width is None or len(note) <= width else f"{note[: width - 1]}…")
    return "\n".join(lines)


def _fit(widths: dict[str, int], width: int) -> None:
    """Remove columns until the others fit; the names of runs lose their beginning."""

    def space() -> int:
        return width - sum(widths.values()) + widths["run"] - 2 * (len(widths) - 1)

    for name in _DISPENSABLE:
        if space() < min(widths["run"], _SHORT_NAME):
            del widths[name]
    widths["run"] = max(8, min(widths["run"], space()))


def _cells(row: ListedRun, now: float) -> tuple[str, ...]:
    step = "" if row.step is None else f"{row.step:,}"
    if row.steps is not None:
        step = f"{step or 0}/{row.steps:,}"
    host = row.host + (f" +{row.hosts - 1}" if row.hosts > 1 else "")
    return (
        row.state.value,
        plain_line(row.run),
        step,
        "" if row.loss is None else formatting.value(row.loss),
        "" if row.speed is None else f"{formatting.short(row.speed)} {row.unit}/s",
        formatting.duration(max(0.0, now - (row.changed if row.started is None else row.started))),
        plain_line(host),
    )


def _padded(text: str, width: int, column: str) -> str:
    if len(text) > width:
        text = f"…{text[len(text) - width + 1 :]}"
    return text.rjust(width) if column in _RIGHT else text.ljust(width)
