"""Explains a run in at most ten sentences: how fast it is, what limits it, what happened, and what to do next.

ranks.jsonl    the split of an update's time, ranks that the others waited for, memory
metrics.jsonl  speed           events.jsonl   evaluations, saves, restarts           config.yaml   what can be changed

A gain is what an update would take without the time that is named, at most (Amdahl's law): it is never a promise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from lockstep.core import formatting
from lockstep.core.command_lines import command_line
from lockstep.report.curves import throughput
from lockstep.report.rank_history import RankHistory, read_rank_history
from lockstep.report.run_data import RunData, read_run

_DATA_SHARE = 0.10
_COMMUNICATION_SHARE = 0.25
_HOST_SHARE = 0.10
_SAVE_SHARE = 0.05
_OPTIMIZER_SHARE = 0.35
_EVALUATION_SHARE = 0.25
_SHORT_S = 0.003  # of an update: what each kernel and each collective costs at least makes up much of it
_UNSTEADY = 3.0  # 95th percentile of an update to its mean


@dataclass(frozen=True, slots=True)
class Limit:
    """A cause that makes a run slower than it could be.

    Attributes:
        name: Such as `data`.
        share: Of an update's time that it takes, at most.
        fact: What was measured.
        remedy: What to change.
    """

    name: str
    share: float
    fact: str
    remedy: str

    @property
    def gain(self) -> float:
        """The factor by which an update would be faster without it."""
        return 1.0 / (1.0 - min(self.share, 0.99))


def explain(folder: Path) -> list[str]:
    """Return the sentences about a run, the most important first. Raises OSError."""
    run, ranks = read_run(folder), read_rank_history(folder)
    causes = limits(run, ranks)
    return [
        *_progress(run),
        *_speed(run, ranks),
        *_split(ranks),
        *(f"{limit.fact}." for limit in causes[:3]),
        *_memory(run, ranks),
        *_events(run),
        *_next(run, causes),
    ][:10]


def limits(run: RunData, ranks: RankHistory) -> list[Limit]:
    """Return what limits a run's speed, the largest first."""
    split = ranks.split()
    if not split:
        return []
    shares = _shares(split)
    candidates = (
        _of_stragglers(ranks),
        _of_data(run, shares, split),
        _of_communication(run, shares, ranks),
        _of_host(shares, split),
        _of_saves(run, shares),
        _of_optimizer(run, shares),
        _of_short_updates(run, split),
        _of_evaluations(run, ranks),
    )
    return sorted((limit for limit in candidates if limit is not None), key=lambda limit: -limit.share)


# --- sentences ----------------------------------------------------------------------------------------------------


def _progress(run: RunData) -> Iterator[str]:
    if not run.columns or not len(run.columns["loss"].steps):
        yield "No update is recorded yet."
        return
    steps = run.columns["loss"].steps
    planned = run.configured("run", "steps")
    of = f" of {planned:,}" if isinstance(planned, int) and planned > steps[-1] else ""
    state = "is finished" if run.summary is not None else "is not finished"
    loss = run.columns["loss"]
    first, last = (formatting.value(float(loss.values[index])) for index in (0, -1))
    attempts = f" over {len(run.restarts) + 1} attempts" if run.restarts else ""
    yield f"The run {state}: {steps[-1]:,.0f}{of} updates, the loss went from {first} to {last}{attempts}."


def _speed(run: RunData, ranks: RankHistory) -> Iterator[str]:
    timed = [
        (seconds, updates)
        for interval in ranks.intervals
        for seconds, updates in zip(interval.step_seconds, interval.updates, strict=True)
        if updates > 0 and math.isfinite(seconds)
    ]
    if not timed:
        return
    mean = sum(seconds * updates for seconds, updates in timed) / sum(updates for _, updates in timed)
    slow = max(
        (value for interval in ranks.intervals for value in interval.slowest if math.isfinite(value)), default=mean
    )
    speed = throughput(run)
    rate = f", {formatting.short(float(np.median(speed.known)))} {speed.name} a second" if len(speed.known) else ""
    unsteady = f"; one in twenty took up to {formatting.duration(slow)}" if slow > _UNSTEADY * mean else ""
    yield f"An update took {formatting.duration(mean)} on average{rate}{unsteady}."


def _split(ranks: RankHistory) -> Iterator[str]:
    shares = _shares(ranks.split())
    parts = [f"{name} {100 * share:.0f} %" for name, share in shares.items() if share >= 0.005]
    if parts:
        yield f"Where an update's time went: {', '.join(parts)}."
    else:
        yield "Where an update's time went wasn't measured (monitor.meter_seconds, or too few updates)."


def _memory(run: RunData, ranks: RankHistory) -> Iterator[str]:
    for gauge, what in (("memory_allocated_peak", "of the device"), ("memory_resident_peak", "resident")):
        peak = ranks.peak(gauge)
        if peak is not None:
            yield f"At most {formatting.size(int(peak[0]))} {what} were used, by rank {peak[1]}."
            return


def _events(run: RunData) -> Iterator[str]:
    parts = []
    if run.restarts:
        steps = ", ".join(f"{step:,}" for step, _ in run.restarts[:5])
        parts.append(f"it was resumed from step {steps}")
    if run.discarded:
        parts.append(f"{len(run.discarded):,} updates were discarded, the last at step {run.discarded[-1][0]:,}")
    if failed := [save for save in run.saves if save.failure is not None]:
        parts.append(f"{len(failed)} of {len(run.saves)} saves failed ({failed[-1].failure})")
    if parts:
        text = "; ".join(parts)
        yield f"{text[0].upper()}{text[1:]}."


def _next(run: RunData, causes: list[Limit]) -> Iterator[str]:
    if run.summary is None and any(save.failure is None for save in run.saves):
        command = command_line("lockstep", "train", run.folder)
        yield f"`{command}` resumes it from the newest checkpoint, unless it is running."
    for limit in causes[:2]:
        yield f"To try: {limit.remedy} (at most {limit.gain:.1f} times as fast)."
    if not causes and run.columns and len(run.columns["loss"].steps):
        ideas = [*(["precision.compute: bf16"] if run.configured("precision", "compute") == "fp32" else [])]
        ideas += ["a larger batch.micro_size", "more ranks"]
        yield f"Nothing but the computation itself limits it; to try are {', '.join(ideas)}."


# --- what limits a run --------------------------------------------------------------------------------------------


def _shares(split: Mapping[str, float]) -> dict[str, float]:
    whole = sum(split.values())
    return {name: part / whole for name, part in sorted(split.items(), key=lambda item: -item[1])} if whole else {}


def _of_stragglers(ranks: RankHistory) -> Limit | None:
    slowest = next(iter(ranks.stragglers()), None)
    if slowest is None or slowest.intervals * 2 < len(ranks.intervals) or not slowest.ratio > 1.0:
        return None
    rank, phase = slowest.rank, slowest.phase
    host = "its host is slower, shares its cores, or throttles" if phase in ("forward", "backward") else phase
    return Limit(
        "straggler",
        1.0 - 1.0 / slowest.ratio,
        f"Rank {rank} computed {slowest.ratio:.1f} times as long as the median rank, above all in {phase}, and the "
        f"others waited for it (in {slowest.intervals} of {len(ranks.intervals)} intervals)",
        f"look at rank {rank}'s {host if phase != 'data' else 'storage and data'}; `lockstep doctor` there",
    )


def _of_data(run: RunData, shares: Mapping[str, float], split: Mapping[str, float]) -> Limit | None:
    share = shares.get("data", 0.0)
    if share < _DATA_SHARE:
        return None
    loader = run.configured("data", "loader")
    workers = loader.get("workers", 0) if isinstance(loader, Mapping) else 0
    more = max(2, 2 * workers) if isinstance(workers, int) else 2
    return Limit(
        "data",
        share,
        f"The data came too late: each update waited {formatting.duration(split['data'])} for its samples",
        f"data.loader.workers: {more}, or samples that are prepared beforehand",
    )


def _of_communication(run: RunData, shares: Mapping[str, float], ranks: RankHistory) -> Limit | None:
    share = shares.get("communication", 0.0)
    if share < _COMMUNICATION_SHARE or _of_stragglers(ranks) is not None:  # then it is the wait for that rank
        return None
    return Limit(
        "communication",
        share,
        f"Ranks waited {100 * share:.0f} % of the time for what others sent, although none of them was slow",
        "a larger batch.global_size (fewer reductions a sample), parallel.ddp.compression under DDP, or faster links, "
        "which `lockstep doctor --ranks N` measures",
    )


def _of_host(shares: Mapping[str, float], split: Mapping[str, float]) -> Limit | None:
    share = shares.get("host", 0.0)
    if share < _HOST_SHARE:
        return None
    return Limit(
        "host",
        share,
        f"{formatting.duration(split['host'])} of each update went to Python between updates: monitors, your own code",
        "do less in monitors that see every update, or do it in a thread",
    )


def _of_saves(run: RunData, shares: Mapping[str, float]) -> Limit | None:
    share = shares.get("save", 0.0)
    if share < _SAVE_SHARE:
        return None
    number = sum(save.failure is None for save in run.saves)
    return Limit(
        "saves",
        share,
        f"Training waited for {number:,} saves, {100 * share:.0f} % of the time",
        "checkpoint.every larger, or checkpoint.asynchronous: true",
    )


def _of_optimizer(run: RunData, shares: Mapping[str, float]) -> Limit | None:
    share = shares.get("optimizer", 0.0)
    if share < _OPTIMIZER_SHARE:
        return None
    return Limit(
        "optimizer",
        share,
        f"The optimizer took {100 * share:.0f} % of each update: the batch is small beside the model",
        "a larger batch.global_size",
    )


def _of_short_updates(run: RunData, split: Mapping[str, float]) -> Limit | None:
    whole = sum(split.values())
    if whole >= _SHORT_S:
        return None
    return Limit(
        "tiny batches",
        0.5,
        f"Updates are so short ({formatting.duration(whole)}) that fixed costs make up much of them",
        "a larger batch.global_size",
    )


def _of_evaluations(run: RunData, ranks: RankHistory) -> Limit | None:
    """Return a limit if evaluations take much of the time, which is what the intervals have beside updates."""
    seconds = sum(interval.seconds for interval in ranks.intervals if math.isfinite(interval.seconds))
    training = sum(
        interval.updates[0] * interval.step_seconds[0]
        for interval in ranks.intervals
        if interval.updates and math.isfinite(interval.step_seconds[0])
    )
    evaluations = sum(len(next(iter(metrics.values()), {})) for metrics in run.evaluations.values())
    if evaluations < 2 or not seconds or (share := 1.0 - training / seconds) < _EVALUATION_SHARE:
        return None
    return Limit(
        "evaluations",
        share,
        f"Up to {100 * share:.0f} % of the time was outside of updates, with {evaluations:,} evaluations",
        "evaluation.every larger, or a smaller evaluation set",
    )
