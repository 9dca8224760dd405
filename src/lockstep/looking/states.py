"""The state of a run, from the files that are there.

summary.json                       --> done, or diverged by its losses
run.lock held, or a new live.json  --> running, or starting before the first update
logs/ends*.jsonl                   --> stopped, failed, diverged
none of these                      --> failed: its launcher was killed; stopped: other launchers leave no record
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from lockstep.core.files import changed
from lockstep.core.formatting import duration
from lockstep.launch.ends_file import last_launch, why_unrecorded
from lockstep.monitor.attempts import is_running
from lockstep.monitor.events import sampled_losses
from lockstep.monitor.folder import ENVIRONMENT, METRICS, SUMMARY, is_finished
from lockstep.monitor.jsonl import as_number, read_object
from lockstep.monitor.rank_meters import LIVE

_FRESH_S = 30.0
"""A run with a younger live.json, replaced every 2 s, counts as running, wherever that is."""
_SUSPECT = 2.0  # times the lowest loss; above it the losses are examined


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
        """A sentence on how the run ended, or what is unusual; may be empty."""
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
    silent = time.time() - as_number(live.get("time"), changed(run / LIVE)) if live else math.inf
    if is_running(run):
        return _active(run, live, silent)
    return _ended(run)


def _early_end(run: Path) -> str:
    reason = read_object(run / SUMMARY).get("stopped_early")
    return f"ended early: {reason}" if isinstance(reason, str) and reason else ""


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
