"""Goodput: the share of a run's wall time spent on updates that were kept, over all its attempts.

launched     began                 last sign   launched   began                             last sign
   |- startup -|- updates ... lost -|- downtime -|- startup -|- updates, evaluations, saves ---|

Updates since the checkpoint that the next attempt resumed from are lost. So are the last attempt's since its
newest checkpoint, if the run isn't finished.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from lockstep.core.files import opened_regular
from lockstep.monitor.attempts import ENDS, Attempt, is_running, last_sign, read_attempts
from lockstep.monitor.events import EVENTS
from lockstep.monitor.folder import CHECKPOINTS, LOGS, METRICS, held_by, is_finished
from lockstep.monitor.jsonl import as_number, last_record, parsed, read_object
from lockstep.monitor.rank_meters import LIVE

_SAVED = re.compile(r"step-(\d{8,15})")


@dataclass(frozen=True, slots=True)
class Goodput:
    """The wall time of a run by use, in seconds.

    Attributes:
        wall: From the first launch to the last sign of life.
        trained: In updates that were kept and saved.
        evaluations, saves: That training waited for.
        lost: In updates that were repeated, or never saved, because an attempt had ended.
        startup, downtime: Until the first updates, and between attempts.
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
        return min(1.0, self.trained / self.wall) if self.wall > 0 else math.nan

    def losses(self) -> dict[str, float]:
        """Return the seconds of everything else, the largest first; `other` is mostly the run's end."""
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


@dataclass(frozen=True, slots=True)
class RestartCost:
    """The seconds that a restart cost: repeated updates, the time between attempts, and until the first update."""

    lost: float
    downtime: float
    startup: float

    @property
    def seconds(self) -> float:
        return self.lost + self.downtime + self.startup


def restart_costs(attempts: Sequence[Attempt]) -> list[RestartCost]:
    """Return the cost of each attempt but the first."""
    costs = []
    for before, attempt in pairwise(attempts):
        end = attempt.ended_before if attempt.ended_before >= before.began else before.began
        begin = _begin(attempt)
        lost = (end - before.began) - (attempt.seconds - before.seconds)
        costs.append(RestartCost(max(0.0, lost), max(0.0, begin - end), max(0.0, attempt.began - begin)))
    return costs


def _begin(attempt: Attempt) -> float:
    return attempt.launched if math.isfinite(attempt.launched) else attempt.began


def goodput(run: Path) -> Goodput | None:
    """Return the goodput of a run, from its files; None if it isn't known. Never raises OSError."""
    attempts = read_attempts(run)
    last = last_record(run / METRICS)
    clock = as_number(last.get("seconds"))
    if not attempts or not math.isfinite(clock):
        return None
    first, costs = attempts[0], restart_costs(attempts)
    steps, discarded = as_number(last.get("step")), as_number(last.get("discarded"))
    kept_step, kept_clock = _kept(run, attempts[-1], steps, clock)
    evaluations, saves, on_clock = _interruptions(run, kept_step)
    lasting = max(0.0, kept_clock - first.seconds - on_clock)
    in_discarded = lasting * discarded / steps if steps > 0 and discarded > 0 else 0.0
    return Goodput(
        max(attempts[-1].began, _end(run)) - _begin(first),
        lasting - in_discarded,
        evaluations,
        saves,
        in_discarded,
        sum(cost.lost for cost in costs) + clock - kept_clock,
        max(0.0, first.began - _begin(first)) + sum(cost.startup for cost in costs),
        sum(cost.downtime for cost in costs),
        len(attempts),
    )


def _kept(run: Path, attempt: Attempt, step: float, clock: float) -> tuple[float, float]:
    """Return step and clock of the last update that isn't lost, given the last attempt and the last recorded update."""
    if is_finished(run) or is_running(run):
        return step, clock
    saved = max((each for each in saved_steps(run) if each <= step), default=0)
    if saved <= attempt.step:
        return attempt.step, attempt.seconds
    share = (saved - attempt.step) / (step - attempt.step)  # as if all its updates took the same time
    return saved, attempt.seconds + share * (clock - attempt.seconds)


def saved_steps(run: Path) -> Iterator[int]:
    """Yield the steps of checkpoints in the folder, and of recorded saves."""
    yield from _steps_in(run / CHECKPOINTS)
    for record in _events(run):
        step = as_number(record.get("step"))
        if "saved" in record and record.get("failure") is None and step >= 0:
            yield int(step)


def _steps_in(checkpoints: Path) -> Iterator[int]:
    with suppress(OSError):
        yield from (int(name[1]) for entry in os.scandir(checkpoints) if (name := _SAVED.fullmatch(entry.name)))


def step_reached(run: Path) -> int:
    """Return the last step that a run is known to have made, by checkpoints, events, live.json and metrics; 0: none."""
    saved = [*_steps_in(run / CHECKPOINTS)] or [*saved_steps(run)]  # events may be long
    steps = [*saved, *(attempt.step for attempt in read_attempts(run)[-1:])]
    steps += [int(as_number(record.get("step"), 0)) for record in (read_object(run / LIVE), last_record(run / METRICS))]
    return max(0, *steps)


def _end(run: Path) -> float:
    if held_by(run) is not None:
        return time.time()
    times = [last_sign(run), as_number(last_record(run / LOGS / ENDS).get("time"))]
    return max(filter(math.isfinite, times), default=math.nan)


def _interruptions(run: Path, step: float) -> tuple[float, float, float]:
    evaluations = saves = on_clock = 0.0
    for record in _events(run):
        seconds = as_number(record.get("seconds" if "evaluation" in record else "lost_seconds"))
        if not seconds > 0:
            continue
        if "evaluation" in record:
            evaluations += seconds
        else:
            saves += seconds
        if as_number(record.get("step")) < step:
            on_clock += seconds
    return evaluations, saves, on_clock


def _events(run: Path) -> Iterator[Mapping[str, Any]]:
    with suppress(OSError), opened_regular(run / EVENTS) as handle, os.fdopen(os.dup(handle), "rb") as lines:
        for text in lines:
            if text.startswith((b'{"evaluation"', b'{"saved"')):
                yield parsed(text) or {}
