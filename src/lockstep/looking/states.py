"""The state of a run, from the files that are there.

summary.json                     --> done        or diverged, if its losses show it
run.lock held, or a live.json    --> starting    no update yet
of the last seconds                  running
logs/ends*.jsonl                 --> stopped, failed, diverged
none of these                    --> failed      its launcher was killed
                                     stopped     other launchers leave no record
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from lockstep.core.files import MAX_JSON_BYTES, changed, opened_regular, read_bounded
from lockstep.core.formatting import duration
from lockstep.launch.ends_file import last_launch, why_unrecorded
from lockstep.monitor.attempts import is_running
from lockstep.monitor.events import passed_discards
from lockstep.monitor.folder import ENVIRONMENT, METRICS, SUMMARY, is_finished
from lockstep.monitor.rank_meters import LIVE

_FRESH_S = 30.0
"""Age up to which a live.json, which is replaced every 2 s, shows that its run is running, wherever that is."""
_SUSPECT = 2.0  # times the lowest loss, from which on the losses are examined
_LOSS = re.compile(
    rb'^\{"step": (\d{1,15}),.*?"loss": (null|-?[\d.]+(?:e[-+]?\d+)?)(?!, "count": 0\.0,)[,}](.*"kept": false)?',
    re.MULTILINE,
)
_BLOCK = 1 << 12
_BLOCKS = 12
_END = 1 << 14


class RunState(Enum):
    """The state of a run."""

    STARTING = "starting"
    RUNNING = "running"
    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"
    DIVERGED = "diverged"

    @property
    def is_active(self) -> bool:
        """True if its processes are there."""
        return self in (RunState.STARTING, RunState.RUNNING)


@dataclass(frozen=True, slots=True)
class RunStatus:
    """The state of a run, and a sentence about it; empty if nothing is unusual."""

    state: RunState
    note: str = ""

    @property
    def sentence(self) -> str:
        """A sentence on how the run ended, or what is unusual about it; empty if nothing is."""
        if self.state is RunState.DONE:
            return f"It {self.note}." if self.note else ""
        if self.state.is_active:
            return f"It is running: {self.note}." if self.note else ""
        ways = {RunState.STOPPED: "It was stopped", RunState.FAILED: "It failed", RunState.DIVERGED: "It diverged"}
        return f"{ways[self.state]}{f': {self.note}' if self.note else ''}."


def status_of(run: Path) -> RunStatus:
    """Return the state of the run in a folder. Never raises OSError."""
    live = read_object(run / LIVE)
    if is_finished(run):
        losses = _divergence(run)
        return RunStatus(RunState.DIVERGED, losses) if losses else RunStatus(RunState.DONE, _early_end(run))
    silent = time.time() - number(live.get("time"), changed(run / LIVE)) if live else math.inf
    if is_running(run):
        return _active(run, live, silent)
    return _ended(run)


def _early_end(run: Path) -> str:
    reason = read_object(run / SUMMARY).get("stopped_early")
    return f"ended early: {reason}" if isinstance(reason, str) and reason else ""


def number(value: object, otherwise: float = math.nan) -> float:
    """Return a finite number as it is, and something else instead of anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if is_number and isinstance(value, int | float) else otherwise


def _active(run: Path, live: Mapping[str, Any], silent: float) -> RunStatus:
    if not live and changed(run / METRICS) <= changed(run / ENVIRONMENT):
        return RunStatus(RunState.STARTING)
    if live and silent >= _FRESH_S:
        return RunStatus(RunState.RUNNING, f"no sign of life for {duration(silent)}")
    return RunStatus(RunState.RUNNING, _divergence(run))


def _ended(run: Path) -> RunStatus:
    last = last_launch(run, read_object(run / ENVIRONMENT))
    losses = _divergence(run)
    if not last.records:
        if losses:
            return RunStatus(RunState.DIVERGED, losses)
        note = f"it left no record: {why_unrecorded(run)}" if last.was_killed else ""
        return RunStatus(RunState.FAILED if last.was_killed else RunState.STOPPED, note)
    end = last.records[0]
    text = end.text.partition("\n")[0] or ("" if end.kind.is_stop else end.kind.title)
    if losses:
        return RunStatus(RunState.DIVERGED, losses)
    return RunStatus(RunState.STOPPED if end.kind.is_stop else RunState.FAILED, text)


def _divergence(run: Path) -> str:
    losses = sampled_losses(run / METRICS)
    values = [value for _, value in losses]
    finite = [abs(value) for value in values if math.isfinite(value)]
    if not values or (math.isfinite(values[-1]) and abs(values[-1]) <= _SUSPECT * min(finite)):
        return ""

    from lockstep.doctor.losses import finding_of_losses  # needs NumPy, and few runs need it
    from lockstep.report.series import Series

    finding = finding_of_losses(Series.of("loss", [step for step, _ in losses], values))
    return finding.text.partition(". ")[0] if finding is not None and finding.is_wrong else ""


# --- files: what is missing, damaged, a link or no file counts as empty ----------------------------------------------


def read_object(file: Path) -> Mapping[str, Any]:
    """Return a file's JSON object; empty if it has none."""
    try:
        content = None if file.is_symlink() else json.loads(read_bounded(file, MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def last_records(file: Path, size: int) -> list[dict[str, Any]]:
    """Return the JSON objects in the last `size` bytes of a file of lines."""
    return read_tail(file, size)[0]


def read_tail(file: Path, size: int) -> tuple[list[dict[str, Any]], int]:
    """Return the JSON objects in the last `size` bytes of a file of lines, and the number of lines that are damaged.

    The last line of a file may be on its way: it counts only once it has its end.
    """
    try:
        with opened_regular(file) as handle:
            begin = max(0, os.fstat(handle).st_size - size)
            lines = os.pread(handle, size, begin).split(b"\n")
    except OSError:
        return [], 0
    whole = lines[1:] if begin else lines
    parsed = [_object(text) for text in whole]
    records = [record for record in parsed if record is not None]
    return records, sum(record is None and bool(text) for text, record in zip(whole[:-1], parsed, strict=False))


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def sampled_losses(file: Path) -> list[tuple[int, float]]:
    """Return step and loss of some records of metrics.jsonl, the first and the last among them; NaN: not finite.

    Updates without a sample have none. Discarded updates count only if they are many in a row at the end.
    """
    try:
        with opened_regular(file) as handle:
            size = os.fstat(handle).st_size
            if size <= _BLOCK * _BLOCKS:
                parts = [os.pread(handle, size, 0)]
            else:
                begins = ((size - _BLOCK) * number // (_BLOCKS - 1) for number in range(_BLOCKS - 1))
                parts = [*(os.pread(handle, _BLOCK, begin) for begin in begins), os.pread(handle, _END, size - _END)]
    except OSError:
        return []
    matches = [match for part in parts for match in _LOSS.finditer(part)]
    losses = {int(match[1]): _loss(match[2]) for match in matches}
    gone = passed_discards([int(match[1]) for match in matches if match[3]], max(losses, default=0))
    return sorted((step, loss) for step, loss in losses.items() if step not in gone)


def _loss(text: bytes) -> float:
    try:
        return float("nan") if text == b"null" else float(text)
    except ValueError:
        return float("nan")
