"""attempts.jsonl: a line an attempt, with when and where it began, and what its plan promised. It isn't rewound."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from lockstep.core.files import MAX_JSON_BYTES, read_bounded
from lockstep.core.records import RunInfo
from lockstep.monitor.events import EVENTS, RUN_FACTS
from lockstep.monitor.folder import ATTEMPTS, LOCK, METRICS, held_by, holder_is_gone
from lockstep.monitor.jsonl import as_number, last_record, line, parsed, read_object
from lockstep.monitor.meters import utilization
from lockstep.monitor.rank_meters import LIVE, RANKS

ENDS = "ends.jsonl"
"""The file beside the logs that says how and when each launch ended."""
_FACTS = (*RUN_FACTS, "steps", "micro_size", "accumulation")
_OWN = ("attempt", "launched", "began", "ended_before", "step", "seconds", "hosts", "planned")
_FRESH_S = 30.0


@dataclass(frozen=True, slots=True)
class Planned:
    """The promises of a run's plan for its fullest rank, in bytes; `bubble`: the share that a pipeline's rank waits."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    bubble: float = 0.0

    @property
    def held(self) -> int:
        return self.parameters + self.gradients + self.optimizer


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt of a run. Times are Unix times of rank 0's host.

    Attributes:
        launched: When its launcher took the run's folder; `began`: its first update.
        ended_before: The last sign of life of the attempt before it; NaN: unknown.
        step, seconds: Of the run, at the checkpoint that it resumed from; 0 for none.
        hosts: Names and numbers of ranks.
        facts: The fields of `RunInfo` that explain its speed.
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
        value = as_number(self.facts.get(name))
        return value if value > 0 else None

    def utilization(self, tokens_per_second: float) -> float | None:
        """Return the share of the peak of all ranks' devices that the model's operations use (MFU); None if unknown."""
        flops, peak, ranks = (self.number(name) for name in ("flops_per_token", "peak_flops", "ranks"))
        return utilization(flops, peak, ranks, tokens_per_second)

    def record(self, attempt: int) -> dict[str, Any]:
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
    return {name: getattr(info, name) for name in _FACTS}


def by_host(hosts: Sequence[str]) -> tuple[tuple[str, int], ...]:
    """Return the hosts of the ranks, in their order, each with its number of consecutive ranks."""
    return tuple((host, len([*ranks])) for host, ranks in groupby(hosts))


def attempts_text(attempts: Sequence[Attempt]) -> str:
    return b"".join(line(attempt.record(number)) for number, attempt in enumerate(attempts, 1)).decode()


def read_attempts(run: Path) -> tuple[Attempt, ...]:
    """Return the attempts of a run, in order, without unreadable lines."""
    try:
        content = read_bounded(run / ATTEMPTS, MAX_JSON_BYTES)
    except OSError:
        return ()
    return tuple(attempt for text in content.splitlines() if (attempt := _attempt(text)) is not None)


def attempt_id(number: int, attempt: Attempt) -> str:
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
        record = parsed(text) or {}
        return Attempt(
            _time(record["launched"]),
            float(record["began"]),
            _time(record.get("ended_before")),
            int(record["step"]),
            float(record["seconds"]),
            tuple((str(host), int(ranks)) for host, ranks in record.get("hosts", ())),
            {name: value for name, value in record.items() if name not in _OWN},
            Planned(*((record.get("planned") or {}).get(name, 0) for name in Planned.__slots__)),
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
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
    """Return when a run gave its last sign of life: by its ranks' meters, or else by its files; NaN: never."""
    times = [as_number(record.get("time")) for record in (last_record(run / RANKS), read_object(run / LIVE))]
    for names in ((METRICS, EVENTS), (ATTEMPTS,)):
        for name in () if any(map(math.isfinite, times)) else names:
            with suppress(OSError):
                times.append((run / name).stat().st_mtime)
    return max(filter(math.isfinite, times), default=math.nan)
