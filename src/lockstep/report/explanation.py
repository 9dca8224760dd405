"""Explains a run in at most ten sentences: how fast it is, what limits it, what happened, and what to do next.

progress   speed beside the plan and the devices' peaks   where the time goes   what limits it, and what to try
memory beside the plan   restarts, discarded updates, evaluations, saves   goodput   what to do next
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from lockstep.core import formatting
from lockstep.core.command_lines import command_line
from lockstep.core.files import MAX_JSON_BYTES, read_bounded
from lockstep.launch.last_launch import survived_failures
from lockstep.monitor.attempts import number_or_nan
from lockstep.monitor.goodput import Goodput, goodput, saved_steps
from lockstep.monitor.meter_files import LIVE
from lockstep.monitor.run_lock import held_by
from lockstep.report.curves import throughput
from lockstep.report.facts import bad_numbers, left_out
from lockstep.report.limits import Limit, allows_larger, limits
from lockstep.report.rank_history import RankHistory, damage, read_rank_history
from lockstep.report.roofline import DevicePeak, Roofline, communication, memory, sentences
from lockstep.report.run_data import RunData, read_run

_UNSTEADY = 3.0  # 95th percentile of an update to its mean
_MOST = 10
_MOST_SURVIVED = 3  # failures in a sentence
_NOTABLE = 0.01


@dataclass(frozen=True, slots=True)
class RunExplanation:
    """A run, read and explained.

    Attributes:
        sentences: At most ten, the important first.
        limits: What limits its speed, the largest first.
        roofline: None if nothing is known of its devices, or no update was timed.
        goodput: None if it isn't known.
        notes: What of its files could not be read.
    """

    sentences: tuple[str, ...]
    limits: tuple[Limit, ...] = ()
    roofline: Roofline | None = None
    goodput: Goodput | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Evidence:
    run: RunData
    ranks: RankHistory
    causes: list[Limit]
    traced: bool
    roofline: Roofline | None
    goodput: Goodput | None
    ended: str = ""
    measure: str = field(default="")


def explain(
    folder: Path, profiled: Sequence[Limit] | None = None, peak: DevicePeak | None = None, ended: str = ""
) -> RunExplanation:
    """Explain a run. Raises OSError.

    Args:
        profiled: What the run's traces show; None: it has none.
        peak: Of a rank's device, if it was measured.
        ended: How the run ended, as a sentence; empty if that isn't known, or not unusual.
    """
    run, ranks = read_run(folder), read_rank_history(folder)
    causes = limits(run, ranks)
    known = {cause.name for cause in causes}
    causes += [cause for cause in profiled or () if cause.name not in known]
    seconds = ranks.step_seconds()
    evidence = _Evidence(
        run,
        ranks,
        causes,
        profiled is not None,
        Roofline.of(run.attempts[-1], run.last, seconds, peak) if run.attempts and seconds else None,
        goodput(folder),
        ended,
        f"`{command_line('lockstep', 'explain', folder)} --measure` on a host of the run",
    )
    sentences = tuple(_sentences(evidence))
    return RunExplanation(sentences, tuple(causes), evidence.roofline, evidence.goodput, damage(run, ranks))


def _sentences(evidence: _Evidence) -> list[str]:
    """Return the sentences in their order; if they are too many, without the least important ones, which have 3."""
    run, ranks, roofline = evidence.run, evidence.ranks, evidence.roofline
    slow_ranks = any(cause.name == "straggler" for cause in evidence.causes)
    parts: list[tuple[int, Iterable[str]]] = [
        (0, _progress(run)),
        (0, [evidence.ended] if evidence.ended else []),
        (1, _speed(run, ranks)),
        (1, sentences(roofline, evidence.measure) if roofline is not None else ()),
        (2, communication(roofline, ranks) if roofline is not None and not slow_ranks else ()),
        (1, _split(ranks.split() or _split_so_far(run.folder))),
        (0, [cause.sentences for cause in evidence.causes[:1]]),
        (3, [cause.sentences for cause in evidence.causes[1:]]),
        (2, memory(run.attempts[-1] if run.attempts else None, ranks)),
        (1, [text] if (text := survived_failures(run.folder, _MOST_SURVIVED)) else []),
        (1, _events(run)),
        (1, _goodput(evidence.goodput, is_finished=run.summary is not None)),
        (0, _next(evidence)),
    ]
    ranked = [(importance, sentence) for importance, each in parts for sentence in each]
    places = sorted(range(len(ranked)), key=lambda place: (ranked[place][0], place))[:_MOST]
    return [ranked[place][1] for place in sorted(places)]


def _progress(run: RunData) -> Iterator[str]:
    if not run.columns or not len(run.columns["loss"].steps):
        step = f": the run was at step {run.reached:,} at least" if run.reached else ""
        yield f"No update is recorded yet{step}."
        return
    steps = run.columns["loss"].steps
    planned = run.configured("run", "steps")
    made = max(int(steps[-1]), run.reached)
    whole = planned if isinstance(planned, int) and planned > made else made
    updates = f"{made:,} of " * (whole > made) + formatting.counted(whole, "update")
    is_running = run.summary is None and held_by(run.folder) is not None
    state = "is running" if is_running else "is finished" if run.summary is not None else "is not finished"
    loss = run.trained_loss.values
    losses = [formatting.value(float(value)) for value in (*loss[:1], *loss[1:][-1:])]
    attempts = f" over {run.num_attempts} attempts" if run.num_attempts > 1 else ""
    went = ("no update was kept", "the loss was {}", "the loss went from {} to {}")[len(losses)].format(*losses)
    yield f"The run {state}: {updates}, {went}{attempts}."


def _speed(run: RunData, ranks: RankHistory) -> Iterator[str]:
    mean = ranks.step_seconds()
    if mean is None:
        return
    slow = max(
        (value for interval in ranks.intervals for value in interval.slowest if math.isfinite(value)), default=mean
    )
    speed = throughput(run)
    middle = formatting.short(float(np.median(speed.known))) if len(speed.known) else ""
    rate = f"; the median speed was {middle} {speed.name} a second" if middle else ""
    unsteady = f"; one in twenty took up to {formatting.short_time(slow)}" if slow > _UNSTEADY * mean else ""
    yield f"An update took {formatting.short_time(mean)} on average{rate}{unsteady}."


def _split_so_far(run: Path) -> dict[str, float]:
    """Return the seconds of an update by phase that a running run shows before its first interval is over."""
    sums: dict[str, float] = {}
    with suppress(OSError, ValueError, RecursionError, LookupError, TypeError, AttributeError):
        live = json.loads(read_bounded(run / LIVE, MAX_JSON_BYTES)) if held_by(run) is not None else {"ranks": []}
        for name, seconds in (item for rank in live["ranks"] for item in rank["split"].items()):
            if (value := number_or_nan(seconds)) >= 0:
                sums[name] = sums.get(name, 0.0) + value
    return sums


def _split(split: Mapping[str, float]) -> Iterator[str]:
    whole = sum(split.values())
    longest = sorted(split.items(), key=lambda item: -item[1])
    parts = [f"{name} {100 * part / whole:.0f} %" for name, part in longest if whole and part >= 0.005 * whole]
    if parts:
        yield f"Where an update's time went: {', '.join(parts)}."
    else:
        yield "Where an update's time went wasn't measured (monitor.meter_seconds, or too few updates)."


def _events(run: RunData) -> Iterator[str]:
    parts = []
    if run.restarts:
        steps = ", ".join(f"{step:,}" for step, _ in run.restarts[:5])
        more = f" and {len(run.restarts) - 5} more times" if len(run.restarts) > 5 else ""
        parts.append(f"it was resumed from step {steps}{more}")
    if run.discarded:
        number, step = len(run.discarded), run.discarded[-1][0]
        were = "was discarded, at" if number == 1 else "were discarded, the last at"
        parts.append(f"{formatting.counted(number, 'update')} {were} step {step:,}")
    saved = [save for save in run.saves if save.failure is None]
    evaluations = sum(len(next(iter(metrics.values()), {})) for metrics in run.evaluations.values())
    if evaluations:
        parts.append(f"it was evaluated {_times(evaluations)}")
    if saved:
        size = formatting.size(float(np.median([save.size for save in saved])))
        lost = formatting.short_time(sum(save.lost for save in run.saves))
        parts.append(f"saved {_times(len(saved))} ({size}; training waited {lost})")
    if failed := [save for save in run.saves if save.failure is not None]:
        parts.append(f"{len(failed)} of {len(run.saves)} saves failed ({failed[-1].failure})")
    yield from bad_numbers(run, most=3)
    yield from left_out(run.left_out, most=3)
    if parts:
        text = "; ".join(parts)
        yield f"{text[0].upper()}{text[1:]}."


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number:,} times")


def _goodput(useful: Goodput | None, *, is_finished: bool) -> Iterator[str]:
    if useful is None or not math.isfinite(useful.share):
        return
    losses = {name: seconds for name, seconds in useful.losses().items() if seconds >= _NOTABLE * useful.wall}
    names = {"other": "the end of the run"} if is_finished else {}
    rest = ", ".join(f"{100 * seconds / useful.wall:.0f} % {names.get(name, name)}" for name, seconds in losses.items())
    attempts = f" and {useful.attempts} attempts" if useful.attempts > 1 else ""
    yield (
        f"Its goodput is {100 * useful.share:.0f} %: of {formatting.duration(useful.wall)}{attempts}, that share "
        f"trained updates that were kept{f'; the rest is {rest}' if rest else ''}."
    )


def _next(evidence: _Evidence) -> Iterator[str]:
    run = evidence.run
    if run.summary is None and held_by(run.folder) is None and any(True for _ in saved_steps(run.folder)):
        yield f"`{command_line('lockstep', 'train', run.folder)}` resumes it from the newest checkpoint."
    if not run.columns or not len(run.columns["loss"].steps):
        return
    if not evidence.causes and evidence.ranks.split():
        ideas = [*(["precision.compute: bf16"] if run.configured("precision", "compute") == "fp32" else [])]
        ideas += ["a larger batch.micro_size"] if allows_larger(run.attempts) else []
        yield f"Nothing but the computation itself limits it; to try are {', '.join([*ideas, 'more ranks'])}."
    if not evidence.traced:
        yield (
            f"What is inside forward and backward (numbers read on the host, small operators) only a profile shows: "
            f"`{command_line('lockstep', 'profile', run.folder)}` while it trains."
        )
