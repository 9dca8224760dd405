"""attempts.jsonl: a line an attempt, with when and where it began, and what its plan promised.

    {"attempt": 2, "launched": 1790000000.0, "began": 1790000004.2, "ended_before": 1789999990.1, "step": 480,
     "seconds": 96.1, "hosts": [["a", 8], ["b", 8]], "ranks": 16, "flops_per_token": 1.2e9, "planned": {...}, ...}

Unlike the files with lines of updates, it isn't rewound: an attempt whose updates were lost has taken its time, too.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockstep.core.files import MAX_JSON_BYTES, opened_regular, read_bounded
from lockstep.core.records import RunInfo
from lockstep.monitor.events import EVENTS
from lockstep.monitor.folder import ATTEMPTS, LOCK, METRICS, held_by, holder_is_gone
from lockstep.monitor.jsonl import line
from lockstep.monitor.rank_meters import LIVE, RANKS

ENDS = "ends.jsonl"
"""The file, among the logs, with a line for each round of ranks: how and when it ended."""
_FACTS = (
    "strategy",
    "ranks",
    "backend",
    "device",
    "precision",
    "steps",
    "global_size",
    "micro_size",
    "accumulation",
    "parameters",
    "trainable",
    "flops_per_token",
    "peak_flops",
)
_OWN = ("attempt", "launched", "began", "ended_before", "step", "seconds", "hosts", "planned")
_FRESH_S = 30.0
_LARGEST = 1e30
_TAIL = 1 << 22  # bytes: a line of 1,024 ranks has 100 KB


@dataclass(frozen=True, slots=True)
class Planned:
    """The promises of a run's plan for each rank.

    Attributes:
        parameters, gradients, optimizer: Bytes that the fullest rank holds.
        sent: Bytes that a rank sends in an update; None where the model is divided over ranks.
        bubble: Share of its time that a rank of a pipeline waits.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    sent: float | None = None
    bubble: float = 0.0

    @property
    def held(self) -> int:
        """Bytes of all of them."""
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt of a run. Times are of the clock of the first rank's host, in seconds of the epoch.

    Attributes:
        launched: When its launcher took the run's folder.
        began: When its first update began.
        ended_before: When the attempt before it gave its last sign; NaN: there was none, or it isn't known.
        step, seconds: Of the run, at the checkpoint that it resumed from; 0 for none.
        hosts: Their names and numbers of ranks, in the order of ranks.
        facts: Those of `RunInfo` that explain its speed; empty where they aren't known.
    """

    launched: float
    began: float
    ended_before: float = math.nan
    step: int = 0
    seconds: float = 0.0
    hosts: tuple[tuple[str, int], ...] = ()
    facts: Mapping[str, Any] = field(default_factory=dict)
    planned: Planned = field(default_factory=Planned)

    def number(self, name: str) -> float | None:
        """Return a positive number of the facts; None if it isn't known."""
        value = number_or_nan(self.facts.get(name))
        return value if value > 0 else None

    def utilization(self, tokens_per_second: float) -> float | None:
        """Return the share of the peak of all ranks' devices that the model's operations use (MFU); None if unknown."""
        flops, peak, ranks = (self.number(name) for name in ("flops_per_token", "peak_flops", "ranks"))
        if flops is None or peak is None or ranks is None or not math.isfinite(tokens_per_second):
            return None
        return tokens_per_second * flops / (peak * ranks)

    def record(self, attempt: int) -> dict[str, Any]:
        """Return it as an object of JSON."""
        return {
            "attempt": attempt,
            "launched": round(self.launched, 3),
            "began": round(self.began, 3),
            "ended_before": round(self.ended_before, 3) if math.isfinite(self.ended_before) else None,
            "step": self.step,
            "seconds": round(self.seconds, 6),
            "hosts": self.hosts,
            **self.facts,
            "planned": asdict(self.planned),
        }


def facts_of(info: RunInfo) -> dict[str, Any]:
    """Return the facts of an attempt."""
    return {name: getattr(info, name) for name in _FACTS}


def by_host(hosts: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """Return the hosts of the ranks, in their order, each with its number of consecutive ranks."""
    runs: list[tuple[str, int]] = []
    for host in hosts:
        if runs and runs[-1][0] == host:
            runs[-1] = (host, runs[-1][1] + 1)
        else:
            runs.append((host, 1))
    return tuple(runs)


def attempts_text(attempts: Sequence[Attempt]) -> str:
    """Return the content of attempts.jsonl."""
    return b"".join(line(attempt.record(number)) for number, attempt in enumerate(attempts, 1)).decode()


def read_attempts(run: Path) -> tuple[Attempt, ...]:
    """Return the attempts of a run, the first one first; none of those whose lines can't be read."""
    try:
        content = read_bounded(run / ATTEMPTS, MAX_JSON_BYTES)
    except OSError:
        return ()
    return tuple(attempt for text in content.splitlines() if (attempt := _attempt(text)) is not None)


def attempt_id(number: int, attempt: Attempt) -> str:
    """Return what identifies an attempt of a run, the `number`th."""
    return f"{number}-{attempt.began:.3f}"


def last_steps(attempts: Sequence[Attempt]) -> dict[str, float]:
    """Return the last step of each attempt that led to the newest one, by `attempt_id`: where a later one resumed."""
    steps, last = dict[str, float](), math.inf
    for number, attempt in reversed([*enumerate(attempts, 1)]):
        steps[attempt_id(number, attempt)] = last
        last = min(last, attempt.step)
    return steps


def _attempt(text: bytes) -> Attempt | None:
    try:
        record: dict[str, Any] = json.loads(text)
        return Attempt(
            _time(record["launched"]),
            float(record["began"]),
            _time(record.get("ended_before")),
            int(record["step"]),
            float(record["seconds"]),
            tuple((str(host), int(ranks)) for host, ranks in record.get("hosts", ())),
            {name: value for name, value in record.items() if name not in _OWN},
            Planned(**record.get("planned") or {}),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _time(value: Any) -> float:
    return math.nan if value is None else float(value)


def launched(run: Path) -> float:
    """Return when the launcher of the current attempt took the run's folder; NaN if it isn't known."""
    try:
        return (run / LOCK).stat().st_mtime
    except OSError:
        return math.nan


def is_running(run: Path) -> bool:
    """Return whether a run trains: here by its lock, elsewhere by its live.json, which is replaced every 2 s."""
    if held_by(run) is not None:
        return True
    with suppress(OSError):
        return abs(time.time() - (run / LIVE).stat().st_mtime) < _FRESH_S and not holder_is_gone(run)
    return False


def last_sign(run: Path) -> float:
    """Return when a run gave its last sign, of whatever attempt; NaN: never.

    It is the time of its ranks' last meters, or, where none are written, that of its files, the beginning of its last
    attempt at least.
    """
    times = [number_or_nan(last_record(run / RANKS).get("time"))]
    with suppress(OSError, ValueError, AttributeError, RecursionError):
        times.append(number_or_nan(json.loads(read_bounded(run / LIVE, MAX_JSON_BYTES)).get("time")))
    for names in ((METRICS, EVENTS), (ATTEMPTS,)):  # the latter alone: no attempt has finished an update
        for name in () if any(map(math.isfinite, times)) else names:
            with suppress(OSError):
                times.append((run / name).stat().st_mtime)
    return max(filter(math.isfinite, times), default=math.nan)


def last_record(file: Path) -> Mapping[str, Any]:
    """Return the last whole line of a file of JSON objects; empty if there is none."""
    for size in (1 << 15, _TAIL):
        try:
            with opened_regular(file) as handle:
                begin = max(0, os.fstat(handle).st_size - size)
                lines = os.pread(handle, size, begin).splitlines(keepends=True)
        except OSError:
            return {}
        for text in reversed(lines):
            with suppress(ValueError, RecursionError):
                record = json.loads(text) if text.endswith(b"\n") else None
                if isinstance(record, dict):
                    return record
    return {}


def number_or_nan(value: object) -> float:
    """Return a number that a file has; NaN for anything else, and for what is too large to be measured."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < _LARGEST
    return float(value) if is_number and isinstance(value, int | float) else math.nan
