"""Goodput: the share of a run's wall time in which it trained updates that were kept, over all its attempts.

launched     began                 last sign   launched   began                             last sign
   |- startup -|- updates ... lost -|- downtime -|- startup -|- updates, evaluations, saves ---|

attempts.jsonl has when each attempt was launched and began, metrics.jsonl the clock of the kept updates, events.jsonl
evaluations and saves. An attempt's time that is no part of the clock of the kept updates is lost: its updates since the
checkpoint that the next one resumed from are repeated. So are those of the last attempt since its newest checkpoint, if
it has ended before the run was finished.
"""

from __future__ import annotations

import json
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

from lockstep.core.files import MAX_JSON_BYTES, opened_regular, read_bounded
from lockstep.monitor.attempts import (
    ENDS,
    Attempt,
    holder_may_live,
    last_record,
    last_sign,
    number_or_nan,
    read_attempts,
)
from lockstep.monitor.events import EVENTS
from lockstep.monitor.folder import CHECKPOINTS, LOGS, METRICS, held_by, is_finished
from lockstep.monitor.rank_meters import LIVE

_SAVED = re.compile(r"step-(\d{8,15})")
_FRESH_S = 30.0  # since the last sign of a run on another host, whose lock doesn't show here


@dataclass(frozen=True, slots=True)
class Goodput:
    """The wall time of a run by use, in seconds.

    Attributes:
        wall: Since its first attempt was launched, until its last sign.
        trained: In updates that were kept, and that no end of an attempt has taken back.
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


@dataclass(frozen=True, slots=True)
class RestartCost:
    """The seconds that a restart has cost.

    Attributes:
        lost: Of the attempt before it: updates that were made again, and what passed until its end was noticed.
        downtime: Between the two attempts.
        startup: Until the first update.
    """

    lost: float
    downtime: float
    startup: float

    @property
    def seconds(self) -> float:
        """All of them."""
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
    clock = number_or_nan(last.get("seconds"))
    if not attempts or not math.isfinite(clock):
        return None
    ended = _end(run)
    begins = [_begin(attempt) for attempt in attempts]
    ends = [*(attempt.ended_before for attempt in attempts[1:]), ended]
    ends = [end if end >= attempt.began else attempt.began for attempt, end in zip(attempts, ends, strict=True)]
    steps, discarded = number_or_nan(last.get("step")), number_or_nan(last.get("discarded"))
    kept = _kept(run, attempts[-1], _ClockedUpdate(steps, clock))
    interruptions = _interruptions(run, steps, kept.step)
    training = max(0.0, clock - attempts[0].seconds - interruptions.before_last)
    lasting = min(training, max(0.0, kept.clock - attempts[0].seconds - interruptions.before_kept))
    in_discarded = lasting * discarded / steps if steps > 0 and discarded > 0 else 0.0
    return Goodput(
        max(ends[-1] - begins[0], training),
        lasting - in_discarded,
        interruptions.evaluations,
        interruptions.saves,
        in_discarded,
        max(0.0, _lost(attempts, ends) - interruptions.on_no_clock) + training - lasting,
        sum(max(0.0, attempt.began - begin) for attempt, begin in zip(attempts, begins, strict=True)),
        sum(max(0.0, begin - end) for begin, end in zip(begins[1:], ends, strict=False)),
        len(attempts),
    )


@dataclass(frozen=True, slots=True)
class _ClockedUpdate:
    """An update of a run, and the run's clock after it."""

    step: float
    clock: float


def _kept(run: Path, attempt: Attempt, last: _ClockedUpdate) -> _ClockedUpdate:
    """Return the last update that isn't lost: of a run that has ended unfinished, that of its newest checkpoint.

    Args:
        attempt: The last one.
        last: The last update that is recorded.
    """
    if is_finished(run) or held_by(run) is not None or _trains_elsewhere(run):
        return last
    saved = max((step for step in saved_steps(run) if step <= last.step), default=0)
    if saved <= attempt.step:
        return _ClockedUpdate(attempt.step, attempt.seconds)
    share = (saved - attempt.step) / (last.step - attempt.step)  # as if all its updates took the same time
    return _ClockedUpdate(saved, attempt.seconds + share * (last.clock - attempt.seconds))


def _trains_elsewhere(run: Path) -> bool:
    return abs(time.time() - last_sign(run)) < _FRESH_S and holder_may_live(run)


def saved_steps(run: Path) -> Iterator[int]:
    """Yield the steps of checkpoints: those that the folder has, and those whose saves are recorded."""
    yield from _steps_in(run / CHECKPOINTS)
    for record in _events(run):
        step = number_or_nan(record.get("step"))
        if "saved" in record and record.get("failure") is None and step >= 0:
            yield int(step)


def _steps_in(checkpoints: Path) -> Iterator[int]:
    with suppress(OSError):
        yield from (int(name[1]) for entry in os.scandir(checkpoints) if (name := _SAVED.fullmatch(entry.name)))


def step_reached(run: Path) -> int:
    """Return the last step that a run is known to have made, 0 for none.

    Metrics have every tenth update or so, and a kill takes the last lines: a checkpoint, the place at which the last
    attempt resumed, or live.json may be newer.
    """
    saved = [*_steps_in(run / CHECKPOINTS)] or [*saved_steps(run)]  # events may be long
    steps = [*saved, *(attempt.step for attempt in read_attempts(run)[-1:])]
    with suppress(OSError, ValueError, RecursionError, AttributeError):
        steps.append(_whole(json.loads(read_bounded(run / LIVE, MAX_JSON_BYTES)).get("step")))
    return max((*steps, _whole(last_record(run / METRICS).get("step"))))


def _whole(value: object) -> int:
    step = number_or_nan(value)
    return int(step) if step >= 0 else 0


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


@dataclass(frozen=True, slots=True)
class _Interruptions:
    """The seconds of evaluations, and of waiting for saves.

    Attributes:
        before_last, before_kept: Of both, on the clock of the last update, and of the last one that isn't lost. What
            follows these updates isn't on their clocks yet.
        on_no_clock: Of both, after the updates that later attempts resumed from: their clocks begin as those of these.
    """

    evaluations: float
    saves: float
    before_last: float
    before_kept: float
    on_no_clock: float


def _interruptions(run: Path, last: float, kept: float) -> _Interruptions:
    evaluations = saves = on_no_clock = 0.0
    clocked: list[tuple[float, float]] = []  # steps and seconds
    for record in _events(run):
        step = number_or_nan(record.get("step"))
        if "resumed" in record:
            on_no_clock += sum(seconds for at, seconds in clocked if at >= step)
            clocked = [(at, seconds) for at, seconds in clocked if at < step]
            continue
        is_evaluation = "evaluation" in record
        seconds = _positive(record.get("seconds" if is_evaluation else "lost_seconds"))
        evaluations += seconds if is_evaluation else 0.0
        saves += 0.0 if is_evaluation else seconds
        clocked.append((step, seconds))
    before_last, before_kept = (sum(seconds for at, seconds in clocked if at < step) for step in (last, kept))
    return _Interruptions(evaluations, saves, before_last, before_kept, on_no_clock)


def _events(run: Path) -> Iterator[Mapping[str, Any]]:
    with suppress(OSError), opened_regular(run / EVENTS) as handle, os.fdopen(os.dup(handle), "rb") as lines:
        for text in lines:
            if text.startswith((b'{"evaluation"', b'{"saved"', b'{"resumed"')):
                with suppress(ValueError, RecursionError):
                    yield json.loads(text)


def _positive(value: object) -> float:
    number = number_or_nan(value)
    return number if number > 0 else 0.0
