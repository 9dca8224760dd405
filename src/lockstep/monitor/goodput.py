"""Goodput: the share of a run's wall time in which it trained updates that were kept, over all its attempts.

launched     began                 last sign   launched   began                             last sign
   |- startup -|- updates ... lost -|- downtime -|- startup -|- updates, evaluations, saves ---|

attempts.jsonl has when each attempt was launched and began, metrics.jsonl the clock of the kept updates, events.jsonl
evaluations and saves. An attempt's time that is no part of the clock of the kept updates is lost: its updates since the
checkpoint that the next one resumed from are repeated.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.core.files import opened_regular
from lockstep.monitor.attempts import ENDS, Attempt, last_record, last_sign, number_or_nan, read_attempts
from lockstep.monitor.events import EVENTS
from lockstep.monitor.folder import LOGS, METRICS, held_by


@dataclass(frozen=True, slots=True)
class Goodput:
    """The wall time of a run by use, in seconds.

    Attributes:
        wall: Since its first attempt was launched, until its last sign.
        trained: In updates that were kept.
        evaluations, saves: In which training waited for them.
        discarded: In updates that were discarded.
        lost: In updates that were repeated, or never saved, because an attempt had ended.
        startup: Of all attempts, until their first updates.
        downtime: Between attempts.
        attempts: Their number.
    """

    wall: float
    trained: float
    evaluations: float
    saves: float
    discarded: float
    lost: float
    startup: float
    downtime: float
    attempts: int

    @property
    def share(self) -> float:
        """The share of the wall time that trained, in [0, 1]."""
        return min(1.0, self.trained / self.wall) if self.wall > 0 else math.nan

    def losses(self) -> dict[str, float]:
        """Return the seconds of everything else, the most first; `other` is mostly the run's end."""
        losses = {
            "evaluations": self.evaluations,
            "saves": self.saves,
            "discarded updates": self.discarded,
            "updates lost with an attempt": self.lost,
            "startup": self.startup,
            "downtime between attempts": self.downtime,
        }
        losses["other"] = max(0.0, self.wall - self.trained - sum(losses.values()))
        return dict(sorted(losses.items(), key=lambda item: -item[1]))


def goodput(run: Path) -> Goodput | None:
    """Return the goodput of a run, from its files; None if it isn't known. Never raises OSError."""
    attempts = read_attempts(run)
    last = last_record(run / METRICS)
    clock = number_or_nan(last.get("seconds"))
    if not attempts or not math.isfinite(clock):
        return None
    ended = _end(run)
    begins = [attempt.launched if math.isfinite(attempt.launched) else attempt.began for attempt in attempts]
    ends = [*(attempt.ended_before for attempt in attempts[1:]), ended]
    ends = [end if end >= attempt.began else attempt.began for attempt, end in zip(attempts, ends, strict=True)]
    steps, discarded = number_or_nan(last.get("step")), number_or_nan(last.get("discarded"))
    evaluations, saves, in_clock = _interruptions(run, steps)
    training = max(0.0, clock - attempts[0].seconds - in_clock)
    in_discarded = training * discarded / steps if steps > 0 and discarded > 0 else 0.0
    return Goodput(
        max(ends[-1] - begins[0], training),
        training - in_discarded,
        evaluations,
        saves,
        in_discarded,
        _lost(attempts, ends),
        sum(max(0.0, attempt.began - begin) for attempt, begin in zip(attempts, begins, strict=True)),
        sum(max(0.0, begin - end) for begin, end in zip(begins[1:], ends, strict=False)),
        len(attempts),
    )


def _lost(attempts: tuple[Attempt, ...], ends: list[float]) -> float:
    """Return the time of all attempts but the last that the clock of the kept updates doesn't have."""
    worked = sum(end - attempt.began for attempt, end in zip(attempts[:-1], ends, strict=False))
    return max(0.0, worked - (attempts[-1].seconds - attempts[0].seconds))


def _end(run: Path) -> float:
    """Return when the run ended; now if it trains."""
    if held_by(run) is not None:
        return time.time()
    times = [last_sign(run), number_or_nan(last_record(run / LOGS / ENDS).get("time"))]
    return max(filter(math.isfinite, times), default=math.nan)


def _interruptions(run: Path, last_step: float) -> tuple[float, float, float]:
    """Return the seconds of evaluations, those in which training waited for saves, and those of both before an update.

    Args:
        last_step: The update; what follows it isn't on its clock yet.
    """
    evaluations = saves = before = 0.0
    for record in _events(run):
        is_evaluation = "evaluation" in record
        seconds = _positive(record.get("seconds" if is_evaluation else "lost_seconds"))
        evaluations += seconds if is_evaluation else 0.0
        saves += 0.0 if is_evaluation else seconds
        before += seconds if number_or_nan(record.get("step")) < last_step else 0.0
    return evaluations, saves, before


def _events(run: Path) -> Iterator[Mapping[str, Any]]:
    with suppress(OSError), opened_regular(run / EVENTS) as handle, os.fdopen(os.dup(handle), "rb") as lines:
        for text in lines:
            if text.startswith((b'{"evaluation"', b'{"saved"')):
                with suppress(ValueError, RecursionError):
                    yield json.loads(text)


def _positive(value: object) -> float:
    number = number_or_nan(value)
    return number if number > 0 else 0.0
