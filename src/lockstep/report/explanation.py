"""Explains a run in at most ten sentences: how fast it is, what limits it, what happened, and what to do next."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.core import formatting
from lockstep.core.terminal import command_line
from lockstep.launch.ends_file import survived_failures
from lockstep.monitor.console import time_shares
from lockstep.monitor.folder import held_by
from lockstep.monitor.goodput import Goodput, goodput, saved_steps
from lockstep.report.curves import median_speed, throughput, utilization
from lockstep.report.facts import bad_numbers, events, left_out, state
from lockstep.report.limits import Limit, allows_larger, limits
from lockstep.report.rank_history import RankHistory, read_rank_history
from lockstep.report.run_data import RunData, read_run

_MOST = 10
_MOST_LISTED = 3  # failures, samples and so on in a sentence
_NOTABLE = 0.01


@dataclass(frozen=True, slots=True)
class RunExplanation:
    """A run, explained.

    Attributes:
        limits: What limits its speed, the largest first.
        mfu, goodput: None: unknown.
        notes: What could not be read.
    """

    sentences: tuple[str, ...]
    limits: tuple[Limit, ...]
    mfu: float | None
    goodput: Goodput | None
    notes: tuple[str, ...]


def explain(
    folder: Path,
    profiled: Sequence[Limit] | None = None,
    ended: str = "",
    planned: Callable[[Mapping[str, float]], str] = lambda split: "",
) -> RunExplanation:
    """Explain a run. Raises OSError.

    Args:
        profiled: What the run's traces show; None: it has none.
        ended: How the run ended, in a sentence; may be empty.
        planned: Returns a sentence that sets the seconds of an update by phase beside the plan's; may be empty.
    """
    run, ranks, useful = read_run(folder), read_rank_history(folder), goodput(folder)
    causes = limits(run, ranks)
    known = {cause.name for cause in causes}
    causes += [cause for cause in profiled or () if cause.name not in known]
    parts: list[tuple[int, Iterable[str]]] = [  # beyond ten sentences, those with the largest numbers are left out
        (0, _progress(run)),
        (0, [ended]),
        (1, _speed(run, ranks)),
        (1, _peak(run)),
        (1, _split(ranks.split())),
        (1, [planned(ranks.split())]),
        (0, [cause.sentences for cause in causes[:1]]),
        (3, [cause.sentences for cause in causes[1:]]),
        (2, _memory(run, ranks)),
        (1, [survived_failures(run.folder, _MOST_LISTED)]),
        (1, [*bad_numbers(run, _MOST_LISTED), *left_out(run.left_out, _MOST_LISTED), " ".join(events(run))]),
        (1, _goodput(useful)),
        (0, _next(run, ranks, causes, traced=profiled is not None)),
    ]
    ranked = [(importance, sentence) for importance, each in parts for sentence in each if sentence]
    places = sorted(range(len(ranked)), key=lambda place: (ranked[place][0], place))[:_MOST]
    sentences = tuple(ranked[place][1] for place in sorted(places))
    return RunExplanation(sentences, tuple(causes), utilization(run), useful, (*run.flaws, *ranks.flaws))


def _progress(run: RunData) -> Iterator[str]:
    steps = run.columns["loss"].steps
    if not len(steps):
        step = f": the run was at step {run.reached:,} at least" if run.reached else ""
        yield f"No update is recorded yet{step}."
        return
    planned = run.configured("run", "steps")
    made = max(int(steps[-1]), run.reached)
    whole = planned if isinstance(planned, int) and planned > made else made
    updates = f"{made:,} of " * (whole > made) + formatting.counted(whole, "update")
    loss = run.trained_loss.values
    went = "none was kept"
    if len(loss):
        went = f"the loss went from {formatting.value(float(loss[0]))} to {formatting.value(float(loss[-1]))}"
    attempts = f" over {run.num_attempts} attempts" if run.num_attempts > 1 else ""
    yield f"The run is {state(run).lower()}: {updates}, {went}{attempts}."


def _speed(run: RunData, ranks: RankHistory) -> Iterator[str]:
    mean = ranks.step_seconds()
    if mean is None:
        return
    unit = throughput(run).name
    median = median_speed(run, unit)
    rate = f"; the median speed was {formatting.short(median)} {unit} a second" if median else ""
    yield f"An update took {formatting.short_time(mean)} on average{rate}."


def _peak(run: RunData) -> Iterator[str]:
    mfu, attempt = utilization(run), run.attempts[-1] if run.attempts else None
    if attempt is None or attempt.facts.get("device") == "cpu":
        return
    peak = attempt.number("peak_flops")
    if mfu is None or peak is None:
        of = f"the peak of {attempt.facts.get('device')}" if peak is None else "the operations of its model"
        yield f"Its MFU isn't known for lack of {of}."
        return
    bubble = attempt.planned.bubble
    pipeline = f"; its pipeline waits {bubble:.0%} by the plan" if bubble > _NOTABLE else ""
    yield (
        f"Each rank computes {formatting.short(mfu * peak)}FLOP/s, {100 * mfu:.1f} % (MFU) of the "
        f"{formatting.short(peak)}FLOP/s that the data sheet of {attempt.facts.get('device')} has for "
        f"{attempt.facts.get('precision')}{pipeline}."
    )


def _split(split: Mapping[str, float]) -> Iterator[str]:
    if any(split.values()):
        yield f"Where an update's time went: {time_shares(split)}."
    else:
        yield "Where an update's time went wasn't measured (monitor.meter_seconds, or too few updates)."


def _memory(run: RunData, ranks: RankHistory) -> Iterator[str]:
    for gauge, what in (("memory_allocated_peak", "of the device"), ("memory_resident_peak", "resident")):
        peak = ranks.peak(gauge)
        if peak is None:
            continue
        beside = ""
        if run.attempts and (held := run.attempts[-1].planned).held:
            beside = (
                f"; by its plan {formatting.size(held.held)} are {formatting.size(held.parameters)} weights, "
                f"{formatting.size(held.gradients)} gradients, {formatting.size(held.optimizer)} optimizer state"
            )
        yield f"At most {formatting.size(int(peak[0]))} {what} were used, by rank {peak[1]}{beside}."
        return


def _goodput(useful: Goodput | None) -> Iterator[str]:
    if useful is None or not math.isfinite(useful.share):
        return
    losses = {name: seconds for name, seconds in useful.losses().items() if seconds >= _NOTABLE * useful.wall}
    rest = ", ".join(f"{100 * seconds / useful.wall:.0f} % {name}" for name, seconds in losses.items())
    attempts = f" and {useful.attempts} attempts" if useful.attempts > 1 else ""
    yield (
        f"Its goodput is {100 * useful.share:.0f} %: the share of {formatting.duration(useful.wall)}{attempts} that "
        f"went to updates that were kept{f'; the rest is {rest}' if rest else ''}."
    )


def _next(run: RunData, ranks: RankHistory, causes: Sequence[Limit], *, traced: bool) -> Iterator[str]:
    if run.summary is None and held_by(run.folder) is None and any(True for _ in saved_steps(run.folder)):
        yield f"`{command_line('lockstep', 'train', run.folder)}` resumes it from the newest checkpoint."
    if not len(run.columns["loss"].steps):
        return
    if not causes and ranks.split():
        ideas = [*(["precision.compute: bf16"] if run.configured("precision", "compute") == "fp32" else [])]
        ideas += ["a larger batch.micro_size"] if allows_larger(run.attempts) else []
        yield f"Only the computation itself limits it; try {', '.join([*ideas, 'more ranks'])}."
    if not traced:
        yield (
            f"Only a profile shows what is inside forward and backward (host syncs, small operators): "
            f"`{command_line('lockstep', 'profile', run.folder)}` while it trains."
        )
