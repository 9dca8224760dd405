"""Limits of the speed of a run, by its ranks' measurements: a fact, a remedy, and the most that it may gain."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lockstep.core import formatting
from lockstep.monitor.attempts import Attempt
from lockstep.monitor.rank_meters import Straggler
from lockstep.report.rank_history import RankHistory
from lockstep.report.run_data import RunData

_PHASES = {
    "data": ("data", 0.10, "waits for samples"),
    "communication": ("communication", 0.25, "waits for other ranks"),
    "saves": ("save", 0.05, "waits for checkpoints"),
    "host": ("host", 0.10, "runs Python between updates (monitors, your code)"),
    "optimizer": ("optimizer", 0.35, "runs the optimizer, while the batch is small beside the model"),
}
"""Limits by name: a phase, its least share of an update to be one, and what the update does in it."""
_CROWDED_SHARE = 0.15
_REMEDIES = {
    "straggler": "`lockstep doctor` on its host, which may be slower, share its cores, or throttle; even out its data",
    "crowded host": "end the other processes, ask the scheduler for more cores, or start fewer ranks, loader workers "
    "and threads (OMP_NUM_THREADS) on its host",
    "data": "more data.loader.workers (`lockstep profile data RUN` measures how many pay), or prepared samples",
    "communication": "a larger batch.global_size (fewer reductions a sample), parallel.ddp.compression under DDP if it "
    "is off, or faster links, which `lockstep doctor --ranks N` measures",
    "saves": "checkpoint.every larger, or checkpoint.asynchronous: true if it is off",
    "host": "do less in monitors that see every update, or do it in a thread",
    "optimizer": "a larger batch.global_size",
}
_EVALUATION_SHARE = 0.25
_LEAST_GAIN = 1.05  # times as fast, below which a gain isn't worth a promise
_SHORT_S = 0.003  # of a micro-batch: what each kernel costs at least makes up much of it


@dataclass(frozen=True, slots=True)
class Limit:
    """A cause that makes a run slower.

    Attributes:
        share: Of an update's time that it takes, at most.
        fact: What was measured.
        remedy: What to change.
        bounded: Whether the share bounds the gain (Amdahl's law); otherwise the gain isn't known.
    """

    name: str
    share: float
    fact: str
    remedy: str
    bounded: bool = True

    @property
    def gain(self) -> float | None:
        """The factor by which an update would be faster without it; None: unknown."""
        return 1.0 / (1.0 - min(self.share, 0.99)) if self.bounded else None

    @property
    def sentences(self) -> str:
        gain = f" (at most {self.gain:.1f} times as fast)" if self.gain and self.gain >= _LEAST_GAIN else ""
        return f"{self.fact[:1].upper()}{self.fact[1:]}; to try: {self.remedy}{gain}."


def limits(run: RunData, ranks: RankHistory) -> list[Limit]:
    """Return what limits a run's speed, the largest first."""
    split = ranks.split()
    if not split:
        return []
    causes, whole = [], sum(split.values())
    if frequent := ranks.stragglers():
        intervals, slowest = frequent[0]
        if intervals * 2 >= len(ranks.intervals) and slowest.ratio > 1.0:
            causes.append(straggler_limit(slowest, 1.0 - 1.0 / slowest.ratio))
    waits = causes[0].share * whole if causes else 0.0
    causes += phase_limits({**split, "communication": split.get("communication", 0.0) - waits}, whole)
    waiting = ranks.medians("core_wait_percent").items()
    rank, percent = max(waiting, key=lambda item: item[1], default=(0, 0.0))
    causes += crowded_limits(f"rank {rank}", percent / 100)
    causes += filter(None, (_short_micro_batches(run, split), _evaluations(run, ranks)))
    return sorted(causes, key=lambda limit: -limit.share)


def straggler_limit(slow: Straggler, share: float) -> Limit:
    fact = (
        f"rank {slow.rank} on {slow.host} computes {slow.ratio:.1f} times as long as the median rank, above all in its "
        f"{slow.phase}; the others wait for it"
    )
    return Limit("straggler", share, fact, _REMEDIES["straggler"])


def crowded_limits(who: str, share: float) -> list[Limit]:
    """Return a limit if somebody waits too much of its time for a core."""
    fact = f"{who} waits {share:.0%} of its time for a core that other threads and processes have"
    return [Limit("crowded host", share, fact, _REMEDIES["crowded host"])] if share > _CROWDED_SHARE else []


def phase_limits(split: Mapping[str, float], whole: float) -> Iterator[Limit]:
    """Yield the phases that take too much of an update; `split` has their seconds."""
    for name, (phase, least, what) in _PHASES.items():
        if (share := split.get(phase, 0.0) / whole) > least:
            fact = f"an update {what} for {formatting.short_time(split[phase])}, {share:.0%} of its time"
            yield Limit(name, share, fact, _REMEDIES[name])


def _short_micro_batches(run: RunData, split: Mapping[str, float]) -> Limit | None:
    number = int((run.attempts[-1].number("accumulation") if run.attempts else None) or 1)
    seconds = sum(split.get(phase, 0.0) for phase in ("forward", "backward", "optimizer")) / number
    if seconds >= _SHORT_S:
        return None
    is_larger = number > 1 and allows_larger(run.attempts)
    return Limit(
        "small operators",
        0.5,
        f"its micro-batches are so short ({formatting.short_time(seconds)} each) that operators' fixed costs make up "
        "much of them",
        "a larger batch.micro_size" if is_larger else "a larger batch.global_size, or model.compile: true if it is off",
        bounded=False,
    )


def allows_larger(attempts: Sequence[Attempt]) -> bool:
    """Return whether micro-batches may be larger: no attempt had larger ones, which memory may have run out of."""
    sizes = [attempt.number("micro_size") or 0 for attempt in attempts]
    return not sizes or (sizes[-1] == max(sizes) and attempts[-1].number("accumulation") != 1)


def _evaluations(run: RunData, ranks: RankHistory) -> Limit | None:
    seconds = sum(interval.seconds for interval in ranks.intervals if math.isfinite(interval.seconds))
    training = sum(
        float(interval.updates[0] * interval.step_seconds[0])
        for interval in ranks.intervals
        if math.isfinite(interval.step_seconds[0]) and math.isfinite(interval.updates[0])
    )
    evaluations = sum(len(next(iter(metrics.values()), {})) for metrics in run.evaluations.values())
    if evaluations < 2 or not seconds or (share := 1.0 - training / seconds) < _EVALUATION_SHARE:
        return None
    return Limit(
        "evaluations",
        share,
        f"up to {100 * share:.0f} % of the time was outside of updates, with {evaluations:,} evaluations",
        "evaluation.every larger, or a smaller evaluation set",
    )
