"""A run as `lockstep top` sees it, from live.json (while it trains), metrics.jsonl and events.jsonl."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.core import formatting
from lockstep.core.errors import ConfigError
from lockstep.core.near_runs import not_a_run
from lockstep.looking.listing import RUNS, ListedRun, list_runs, listed
from lockstep.looking.states import RunState
from lockstep.monitor.attempts import read_attempts
from lockstep.monitor.events import EVENTS, sampled_losses
from lockstep.monitor.folder import METRICS, is_run
from lockstep.monitor.jsonl import as_number, read_object, read_tail
from lockstep.monitor.rank_meters import LIVE, POST_S

SILENT_S = 10.0
"""Seconds without a notice until a rank counts as silent; each posts one every 2 s."""
_MEMORY = ("memory_allocated", "memory_used", "memory_resident")
_UTILIZATION = ("gpu_utilization", "utilization")
_EVENTS = 8
_TAIL = 1 << 15
_NO_METRICS = ("evaluation", "step", "samples", "seconds", "not_finite")


@dataclass(frozen=True, slots=True)
class WatchedRank:
    """A rank as it was last seen; NaN: unknown.

    Attributes:
        phase: At its last notice, for `phase_seconds`; `silent`: seconds since then.
        seconds, slowest: Of an update: mean and 95th percentile.
        memory: Bytes, on its device if it has one.
        utilization: Of its GPU, in percent.
        straggler: What slows the others down, such as "1.7x backward"; may be empty.
    """

    rank: int
    host: str
    step: float
    phase: str
    phase_seconds: float
    silent: float
    seconds: float
    slowest: float
    memory: float
    utilization: float
    straggler: str

    @property
    def is_silent(self) -> bool:
        return self.silent > SILENT_S

    @property
    def severity(self) -> tuple[bool, float, bool, float, int]:
        """A key: the rank to look at first has the smallest."""
        known = self.seconds if math.isfinite(self.seconds) else 0.0
        return not self.is_silent, self.step if math.isfinite(self.step) else 0.0, not self.straggler, -known, self.rank


@dataclass(frozen=True, slots=True)
class WatchedRun:
    """All that is shown of a run.

    Attributes:
        last: The last record of metrics.jsonl; may be empty.
        left: Seconds that the rest will take; None: unknown.
        losses: Of some updates, in order.
        split: Mean share of an update by phase.
        events: Sentences, the newest last.
    """

    listed: ListedRun
    last: Mapping[str, Any]
    left: float | None
    losses: tuple[float, ...]
    ranks: tuple[WatchedRank, ...]
    split: Mapping[str, float]
    events: tuple[str, ...]
    mfu: float | None = None

    def as_json(self) -> dict[str, Any]:
        """Return what `lockstep top --json` prints."""
        return {
            **self.listed.as_json(),
            "seconds_left": self.left,
            "mfu": self.mfu,
            "split": dict(self.split),
            "last": dict(self.last),
            "ranks": [asdict(rank) for rank in self.ranks],
            "events": list(self.events),
        }


def watch(run: Path) -> WatchedRun:
    """Read a run's files. What can't be read is left out."""
    row = listed(run)
    live = read_object(run / LIVE) if row.state.is_active else {}
    records, events = (read_tail(run / name, _TAIL) for name in (METRICS, EVENTS))
    attempts = read_attempts(run)
    age = max(0.0, time.time() - as_number(live.get("time"), time.time()))
    return WatchedRun(
        row,
        records[-1] if records else {},
        _time_left(row, records) if row.state is RunState.RUNNING else None,
        tuple(loss for _, loss in sampled_losses(run / METRICS)),
        _ranks(live, age),
        _split(live),
        tuple(filter(None, map(event_text, events[-_EVENTS:]))),
        attempts[-1].utilization(as_number(records[-1].get("tokens_per_second"))) if attempts and records else None,
    )


def chosen_run(run: Path | None) -> Path:
    """Return the run; by default the last one started, if possible one that is running. Raises ConfigError."""
    if run is not None:
        if not is_run(run):
            raise not_a_run(run)
        return run
    rows = list_runs([Path(), Path(RUNS)])
    if not rows:
        raise ConfigError("there is no run in the current folder or in runs; name the folder of a run")
    return Path(next((row.run for row in rows if row.state.is_active), rows[0].run))


# --- ranks ----------------------------------------------------------------------------------------------------------


def _ranks(live: Mapping[str, Any], age: float) -> tuple[WatchedRank, ...]:
    stragglers = _stragglers(live)
    ranks = []
    for record in _objects(live.get("ranks")):
        gauges = record.get("gauges")
        rank = int(as_number(record.get("rank"), 0))
        ranks.append(
            WatchedRank(
                rank,
                str(record.get("host", "")),
                as_number(record.get("step")),
                str(record.get("phase", "")),
                _in_phase(record, age),
                as_number(record.get("silent"), 0.0) + age,
                as_number(record.get("step_seconds")),
                as_number(record.get("slowest")),
                _first(gauges, _MEMORY),
                _first(gauges, _UTILIZATION),
                stragglers.get(rank, ""),
            )
        )
    return tuple(ranks)


def _in_phase(record: Mapping[str, Any], age: float) -> float:
    """Return for how long a rank has been in its phase: until now if it seems stuck, else until its last notice."""
    since, silent = as_number(record.get("phase_seconds")), as_number(record.get("silent"), 0.0)
    posted = since - silent
    return since + age if posted >= POST_S or silent + age > SILENT_S else posted


def _stragglers(record: Mapping[str, Any]) -> dict[int, str]:
    ratios = {}
    for item in _objects(record.get("stragglers")):
        rank, ratio = as_number(item.get("rank"), -1), as_number(item.get("ratio"))
        if math.isfinite(ratio):
            ratios[int(rank)] = f"{ratio:.1f}x {item.get('phase', '')}"
    return ratios


def _split(live: Mapping[str, Any]) -> dict[str, float]:
    totals: dict[str, float] = {}
    for split in (record.get("split") for record in _objects(live.get("ranks"))):
        for name, seconds in split.items() if isinstance(split, dict) else ():
            totals[str(name)] = totals.get(str(name), 0.0) + as_number(seconds, 0.0)
    total = sum(totals.values())
    return {name: seconds / total for name, seconds in totals.items()} if total > 0 else {}


# --- progress, events -----------------------------------------------------------------------------------------------


def _time_left(row: ListedRun, records: list[dict[str, Any]]) -> float | None:
    if row.steps is None or row.step is None or len(records) < 2:
        return None
    first, last = records[-min(len(records), 20)], records[-1]
    done = as_number(last.get("step"), 0.0) - as_number(first.get("step"), 0.0)
    seconds = as_number(last.get("seconds")) - as_number(first.get("seconds"))
    return (row.steps - row.step) * seconds / done if done > 0 and seconds > 0 else None


def event_text(record: Mapping[str, Any]) -> str:
    """Return a sentence about a line of events.jsonl; empty for what users logged."""
    step = f"step {as_number(record.get('step'), 0):,.0f}: "
    if isinstance(name := record.get("evaluation"), str):
        numbers = {key: value for key, value in record.items() if not isinstance(value, str | list | dict)}
        known = {key: as_number(value) for key, value in numbers.items() if key not in _NO_METRICS}
        metrics = {key: value if math.isfinite(value) else None for key, value in known.items()}
        return f"{step}evaluation {name}: {formatting.metrics(metrics)}"
    if "failure" in record:
        return f"{step}not saved: {record['failure']}"
    if "saved" in record:
        size, seconds = (as_number(record.get(key), 0.0) for key in ("bytes", "seconds"))
        return f"{step}saved {formatting.size(size)} in {formatting.duration(seconds)}"
    if "resumed" in record:
        return f"{step}resumed on {as_number(record.get('ranks'), 0):.0f} ranks"
    if "epoch_done" in record:
        loss = as_number(record.get("loss"))
        shown = formatting.value(loss) if math.isfinite(loss) else "not finite"
        return f"{step}epoch {as_number(record.get('epoch_done'), 0) + 1:.0f} done, loss {shown}"
    return ""


def _first(gauges: object, names: Iterable[str]) -> float:
    return next((as_number(gauges[name]) for name in names if isinstance(gauges, dict) and name in gauges), math.nan)


def _objects(value: object) -> list[dict[str, Any]]:
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []
