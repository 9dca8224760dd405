"""Names what limits the speed of a run, from what its ranks measured: a fact, a remedy, and the possible gain.

ranks.jsonl    the split of an update's time, ranks that the others waited for        config.yaml    what can be changed

A gain is what an update would take without the time that is named, at most (Amdahl's law): it is never a promise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from lockstep.core import formatting
from lockstep.core.terminal import command_line
from lockstep.monitor.attempts import Attempt
from lockstep.report.rank_history import RankHistory
from lockstep.report.run_data import RunData

# of an update's time, beyond which a cause is named, here and by a profile
DATA_SHARE = 0.10
COMMUNICATION_SHARE = 0.25
CROWDED_SHARE = 0.15
SAVE_SHARE = 0.05
_HOST_SHARE = 0.10
_OPTIMIZER_SHARE = 0.35
_EVALUATION_SHARE = 0.25
_LEAST_GAIN = 1.05  # times as fast, below which a gain isn't worth a promise
_SHORT_S = 0.003  # of a micro-batch: what each kernel costs at least makes up much of it


@dataclass(frozen=True, slots=True)
class Limit:
    """A cause that makes a run slower than it could be.

    Attributes:
        name: Such as `data`.
        share: Of an update's time that it takes, at most.
        fact: What was measured.
        remedy: What to change.
        bounded: Whether the share bounds the gain; otherwise the gain isn't known.
    """

    name: str
    share: float
    fact: str
    remedy: str
    bounded: bool = True

    @property
    def gain(self) -> float | None:
        """The factor by which an update would be faster without it; None if that isn't known."""
        return 1.0 / (1.0 - min(self.share, 0.99)) if self.bounded else None

    @property
    def sentences(self) -> str:
        """The fact, and what to try."""
        gain = f" (at most {self.gain:.1f} times as fast)" if self.gain and self.gain >= _LEAST_GAIN else ""
        return f"{self.fact}; to try: {self.remedy}{gain}."


def limits(run: RunData, ranks: RankHistory) -> list[Limit]:
    """Return what limits a run's speed, the largest first."""
    split = ranks.split()
    if not split:
        return []
    straggler = _straggler(ranks)
    waits = straggler.share if straggler is not None else 0.0
    candidates = [straggler, _crowded_host(ranks), *_phases(run, split, waits), _short_micro_batches(run, split)]
    candidates.append(_evaluations(run, ranks))
    return sorted((limit for limit in candidates if limit is not None), key=lambda limit: -limit.share)


def _straggler(ranks: RankHistory) -> Limit | None:
    if not (frequent := ranks.stragglers()):
        return None
    intervals, slowest = frequent[0]
    if intervals * 2 < len(ranks.intervals) or not slowest.ratio > 1.0:
        return None
    return Limit(
        "straggler",
        1.0 - 1.0 / slowest.ratio,
        f"Rank {slowest.rank} computed {slowest.ratio:.1f} times as long as the median rank, above all in "
        f"{slowest.phase}, and the others waited for it (in {intervals} of {len(ranks.intervals)} intervals)",
        "its storage, and how much data it has"
        if slowest.phase == "data"
        else "`lockstep doctor` on its host, which may be slower, share its cores, or throttle",
    )


def _crowded_host(ranks: RankHistory) -> Limit | None:
    column = ranks.medians("core_wait_percent")
    rank, percent = max(column.items(), key=lambda item: item[1], default=(0, 0.0))
    if percent <= 100 * CROWDED_SHARE:
        return None
    return Limit(
        "crowded host",
        percent / 100,
        f"The host is crowded: rank {rank} waited {percent:.0f} % of its time for a core that other threads and "
        "processes had",
        "end the other processes, ask the scheduler for more cores, or start fewer ranks, loader workers and threads "
        "(OMP_NUM_THREADS) on its host",
    )


def _phases(run: RunData, split: Mapping[str, float], waits: float) -> Iterator[Limit]:
    """Yield the phases that take too much of an update.

    Args:
        waits: Share of an update that ranks wait for a slow one.
    """
    whole = sum(split.values())
    share = {name: split.get(name, 0.0) / whole for name in ("data", "communication", "host", "save", "optimizer")}
    if share["data"] > DATA_SHARE:
        yield Limit(
            "data",
            share["data"],
            f"The data came too late: each update waited {formatting.short_time(split['data'])} for its samples",
            f"more data.loader.workers (`{command_line('lockstep', 'profile', 'data', run.folder)}` measures how many "
            "pay), or samples that are prepared beforehand",
        )
    if (links := share["communication"] - waits) > COMMUNICATION_SHARE:
        ddp = run.configured("parallel", "ddp")
        compresses = isinstance(ddp, Mapping) and ddp.get("compression", "none") != "none"
        yield Limit(
            "communication",
            links,
            f"Ranks waited {100 * links:.0f} % of the time for what others sent, which isn't explained by slow ranks",
            "a larger batch.global_size (fewer reductions a sample), "
            f"{'' if compresses else 'parallel.ddp.compression under DDP, '}or faster links, which "
            "`lockstep doctor --ranks N` measures",
        )
    if share["host"] >= _HOST_SHARE:
        yield Limit(
            "host",
            share["host"],
            f"{formatting.short_time(split['host'])} of an update went to Python between updates (monitors, your code)",
            "do less in monitors that see every update, or do it in a thread",
        )
    if share["save"] > SAVE_SHARE:
        number = sum(save.failure is None for save in run.saves)
        waits_for_disk = run.configured("checkpoint", "asynchronous") is False
        yield Limit(
            "saves",
            share["save"],
            f"Training waited for {formatting.counted(number, 'save')}, {100 * share['save']:.0f} % of the time",
            f"checkpoint.every larger{', or checkpoint.asynchronous: true' if waits_for_disk else ''}",
        )
    if share["optimizer"] >= _OPTIMIZER_SHARE:
        yield Limit(
            "optimizer",
            share["optimizer"],
            f"The optimizer took {100 * share['optimizer']:.0f} % of each update: the batch is small beside the model",
            "a larger batch.global_size",
        )


def _short_micro_batches(run: RunData, split: Mapping[str, float]) -> Limit | None:
    number = int((run.attempts[-1].number("accumulation") if run.attempts else None) or 1)
    seconds = sum(split.get(phase, 0.0) for phase in ("forward", "backward", "optimizer")) / number
    if seconds >= _SHORT_S:
        return None
    what = f"Its {number:,} micro-batches" if number > 1 else "Its updates"
    compiling = "" if run.configured("model", "compile") is True else ", model.compile: true"
    is_larger = number > 1 and allows_larger(run.attempts)
    return Limit(
        "small operators",
        0.5,
        f"{what} are so short ({formatting.short_time(seconds)} each) that operators' fixed costs make up much of them",
        "a larger batch.micro_size" if is_larger else f"a larger batch.global_size{compiling}",
        bounded=False,
    )


def allows_larger(attempts: Sequence[Attempt]) -> bool:
    """Return whether there are larger micro-batches, and no attempt had them, as one has before memory runs out."""
    sizes = [attempt.number("micro_size") or 0 for attempt in attempts]
    return not sizes or (sizes[-1] == max(sizes) and attempts[-1].number("accumulation") != 1)


def _evaluations(run: RunData, ranks: RankHistory) -> Limit | None:
    """Return a limit if evaluations take much of the time, which is what the intervals have beside updates."""
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
        f"Up to {100 * share:.0f} % of the time was outside of updates, with {evaluations:,} evaluations",
        "evaluation.every larger, or a smaller evaluation set",
    )
