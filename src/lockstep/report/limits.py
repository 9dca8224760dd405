"""Names what limits the speed of a run, from what its ranks measured: a fact, a remedy, and the possible gain.

ranks.jsonl    the split of an update's time, ranks that the others waited for        config.yaml    what can be changed

A gain is what an update would take without the time that is named, at most (Amdahl's law): it is never a promise.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lockstep.core import formatting
from lockstep.core.command_lines import command_line
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
SPARE = 1.1
"""Times as many samples as the updates need, which the workers of a data loader should deliver."""
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
    shares = _shares(split)
    candidates = (
        _of_stragglers(ranks),
        _of_crowded_host(ranks),
        _of_data(run, shares, split),
        _of_communication(run, shares, ranks),
        _of_host(shares, split),
        _of_saves(run, shares),
        _of_optimizer(shares),
        _of_short_micro_batches(run, split, ranks),
        _of_evaluations(run, ranks),
    )
    return sorted((limit for limit in candidates if limit is not None), key=lambda limit: -limit.share)


def _shares(split: Mapping[str, float]) -> dict[str, float]:
    whole = sum(split.values())
    return {name: part / whole for name, part in split.items()} if whole else {}


def _of_stragglers(ranks: RankHistory) -> Limit | None:
    slowest = next(iter(ranks.stragglers()), None)
    if slowest is None or slowest.intervals * 2 < len(ranks.intervals) or not slowest.ratio > 1.0:
        return None
    rank, phase = slowest.rank, slowest.phase
    return Limit(
        "straggler",
        ranks.excess(rank, slowest.ratio),
        f"Rank {rank} computed {slowest.ratio:.1f} times as long as the median rank, above all in {phase}, and the "
        f"others waited for it (in {slowest.intervals} of {len(ranks.intervals)} intervals)",
        "its storage, and how much data it has"
        if phase == "data"
        else "`lockstep doctor` on its host, which may be slower, share its cores, or throttle",
    )


def _of_crowded_host(ranks: RankHistory) -> Limit | None:
    """Return a limit if main threads wait for a core, by the median of the rank that waits most."""
    column = ranks.medians("core_wait_percent")
    if not column or max(column.values()) <= 100 * CROWDED_SHARE:
        return None
    rank, percent = max(column.items(), key=lambda item: item[1])
    return Limit(
        "crowded host",
        percent / 100,
        f"The host is crowded: rank {rank} waited {percent:.0f} % of its time for a core that other threads and "
        "processes had",
        "end the other processes, ask the scheduler for more cores, or start fewer ranks, loader workers and threads "
        "(OMP_NUM_THREADS) on its host",
    )


def _of_data(run: RunData, shares: Mapping[str, float], split: Mapping[str, float]) -> Limit | None:
    share = shares.get("data", 0.0)
    if share <= DATA_SHARE:
        return None
    measured = command_line("lockstep", "profile", "data", run.folder)
    given, most = _workers(run), _cores_of_a_rank(run)
    needed = _workers_that_keep_up(given, share)
    few = f", as many as a rank has CPUs ({needed} would keep up)" if needed > most else ""
    prepared = "samples that are prepared beforehand"
    more = f"data.loader.workers: {min(needed, most)}{few} (`{measured}` measures it), or {prepared}"
    return Limit(
        "data",
        share,
        f"The data came too late: each update waited {formatting.short_time(split['data'])} for its samples",
        more if most > given else f"{prepared} (`{measured}` shows what one costs); a rank has no CPU for more workers",
    )


def _workers(run: RunData) -> int:
    """Return the configured number of workers."""
    loader = run.configured("data", "loader")
    given = loader.get("workers", 0) if isinstance(loader, Mapping) else 0
    return given if isinstance(given, int) and given > 0 else 0


def _workers_that_keep_up(workers: int, share: float) -> int:
    """Return the fewest workers, a power of two, that deliver an update's samples while another update is computed.

    Args:
        workers: That the run has.
        share: Of an update that waits for its samples: with workers, they were busy all the time.
    """
    needed = SPARE * (workers if workers else share) / max(0.01, 1.0 - share)
    return 1 << math.ceil(math.log2(max(1.0, needed)))


def _cores_of_a_rank(run: RunData) -> int:
    """Return the CPUs that each rank of the first host has, at least 1; very many if that isn't known."""
    cpus = run.environment.get("cpus")
    if not isinstance(cpus, int) or cpus < 1:
        return sys.maxsize
    ranks = run.attempts[-1].hosts[0][1] if run.attempts and run.attempts[-1].hosts else 1
    return max(1, cpus // max(1, ranks))


def _of_communication(run: RunData, shares: Mapping[str, float], ranks: RankHistory) -> Limit | None:
    straggler = _of_stragglers(ranks)
    share = shares.get("communication", 0.0) - (straggler.share if straggler is not None else 0.0)
    if share <= COMMUNICATION_SHARE:
        return None
    ddp = run.configured("parallel", "ddp")
    compresses = isinstance(ddp, Mapping) and ddp.get("compression", "none") != "none"
    compression = "" if compresses else "parallel.ddp.compression under DDP, "
    return Limit(
        "communication",
        share,
        f"Ranks waited {100 * share:.0f} % of the time for what others sent, which isn't explained by slow ranks",
        f"a larger batch.global_size (fewer reductions a sample), {compression}or faster links, which "
        "`lockstep doctor --ranks N` measures",
    )


def _of_host(shares: Mapping[str, float], split: Mapping[str, float]) -> Limit | None:
    share = shares.get("host", 0.0)
    if share < _HOST_SHARE:
        return None
    return Limit(
        "host",
        share,
        f"{formatting.short_time(split['host'])} of each update went to Python between updates: monitors, your code",
        "do less in monitors that see every update, or do it in a thread",
    )


def _of_saves(run: RunData, shares: Mapping[str, float]) -> Limit | None:
    share = shares.get("save", 0.0)
    if share <= SAVE_SHARE:
        return None
    number = sum(save.failure is None for save in run.saves)
    return Limit(
        "saves",
        share,
        f"Training waited for {formatting.counted(number, 'save')}, {100 * share:.0f} % of the time",
        "checkpoint.every larger"
        + (", or checkpoint.asynchronous: true" if run.configured("checkpoint", "asynchronous") is False else ""),
    )


def _of_optimizer(shares: Mapping[str, float]) -> Limit | None:
    share = shares.get("optimizer", 0.0)
    if share < _OPTIMIZER_SHARE:
        return None
    return Limit(
        "optimizer",
        share,
        f"The optimizer took {100 * share:.0f} % of each update: the batch is small beside the model",
        "a larger batch.global_size",
    )


def _of_short_micro_batches(run: RunData, split: Mapping[str, float], ranks: RankHistory) -> Limit | None:
    number = int((run.attempts[-1].number("accumulation") if run.attempts else None) or 1)
    seconds = sum(split.get(phase, 0.0) for phase in ("forward", "backward", "optimizer")) / number
    if seconds >= _SHORT_S:
        return None
    what = f"Its {number:,} micro-batches" if number > 1 else "Its updates"
    larger = _larger_micro_batches(run, ranks) if number > 1 else ""
    compiling = "" if run.configured("model", "compile") is True else ", model.compile: true"
    return Limit(
        "tiny batches",
        0.5,
        f"{what} are so short ({formatting.short_time(seconds)} each) that operators' fixed costs make up much of them",
        larger or f"a larger batch.global_size{compiling}",
        bounded=False,
    )


def _larger_micro_batches(run: RunData, ranks: RankHistory) -> str:
    """Return what makes micro-batches larger; empty if memory ran out with larger ones, and not of activations."""
    if allows_larger(run.attempts):
        return "a larger batch.micro_size"
    options, peak = run.configured("memory", "activation_checkpointing"), ranks.peak("memory_allocated_peak")
    is_on = isinstance(options, Mapping) and options.get("mode", "none") != "none"
    if is_on or (peak is not None and peak[0] < 2 * run.attempts[-1].planned.held):
        return ""
    return "memory.activation_checkpointing.mode: full, with which a larger batch.micro_size may fit"


def allows_larger(attempts: Sequence[Attempt]) -> bool:
    """Return whether there are larger micro-batches, and no attempt had them, as one has before memory runs out."""
    sizes = [attempt.number("micro_size") or 0 for attempt in attempts]
    return not sizes or (sizes[-1] == max(sizes) and attempts[-1].number("accumulation") != 1)


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
