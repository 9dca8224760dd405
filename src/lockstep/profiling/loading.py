"""Measures the data loader without the model: what a sample costs, and how many samples a second N workers deliver.

Each setting of workers continues where the last one stopped, so that none gets samples from the system's cache.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch.utils.data import Subset

from lockstep.assembly.planning import memory_here
from lockstep.assembly.sources import make_objective, open_sources, users_model
from lockstep.assembly.user_objects import UserObjects, refuse_given
from lockstep.core import formatting
from lockstep.core.formatting import short_time
from lockstep.core.progress import Progress
from lockstep.core.protocols import Source
from lockstep.data.bad_samples import SkippingSource
from lockstep.data.custom import ItemSource
from lockstep.data.fetching import fetch
from lockstep.data.loader import TrainingLoader
from lockstep.data.sources import PreparedSource
from lockstep.launch.devices import choose_ranks, count_cores
from lockstep.models.build import parameter_facts, sketch_model
from lockstep.monitor.folder import is_run
from lockstep.plan.plan import Machine, make_plan
from lockstep.report.rank_history import read_rank_history

if TYPE_CHECKING:
    from pathlib import Path

    from lockstep.config.loading import LoadedConfig
    from lockstep.config.schema import Config, Loader
    from lockstep.core.protocols import EvaluatedObjective, Source
    from lockstep.plan.plan import Plan

_SPARE = 1.1  # times as many samples as the updates need, which workers should deliver
_COST_SHARE = 0.2  # of the time
_ENOUGH = 0.9  # of the fastest setting
_UNNOTICED = 20.0  # times what they need, if the rank reads itself and computes nothing meanwhile


@dataclass(frozen=True, slots=True)
class SampleCost:
    """The seconds that a sample takes in one process.

    Attributes:
        samples: Number that were read.
        mean: With its part of its micro-batch's collate.
        slow, slowest: 95th percentile and longest, of a sample or, unless `by_sample`, of the mean of a micro-batch.
        slowest_index: Of that sample, or of the first in that micro-batch.
        stages: Shares of the time; may be empty.
    """

    samples: int
    mean: float
    slow: float
    slowest: float
    slowest_index: int
    by_sample: bool
    stages: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class LoaderSpeed:
    """Samples and tokens per second with a number of workers, and seconds until the first micro-batch."""

    workers: int
    samples: float
    tokens: float
    first: float


@dataclass(frozen=True, slots=True)
class DataProfile:
    """The profile of a rank's loader.

    Attributes:
        samples: Of an epoch.
        micro_size: Samples that are fetched at once.
        ranks: Of this machine, which share its CPUs.
        configured: Number of workers in the config.
        unmeasured: Why not all settings were measured; may be empty.
        needed: Samples per second that the rank's updates need; None: unknown.
        recommended: Number of workers; None: no setting was measured.
    """

    kind: str
    samples: int
    micro_size: int
    cpus: int
    ranks: int
    configured: int
    cost: SampleCost
    settings: tuple[LoaderSpeed, ...]
    unmeasured: str
    needed: float | None
    recommended: int | None
    reason: str


def profile_data(
    loaded: LoadedConfig, seconds: float, update_seconds: float | None, *, trust_remote_code: bool
) -> DataProfile:
    """Measure the loader of a run's first rank, for `seconds` after opening the data.

    Args:
        update_seconds: What an update takes without waiting for data; None: unknown.

    Raises:
        ConfigError: The config can't be run, or there are no samples.
        RunFailed: A sample can't be read, or a worker died.
    """
    refuse_given(loaded)
    config = loaded.config
    data = _opened(config, UserObjects(trust_remote_code=trust_remote_code))
    end = time.perf_counter() + seconds
    cost = _cost(data, _COST_SHARE * seconds)
    cpus, ranks = count_cores(), choose_ranks(config.launch)
    numbers = settings(cpus // ranks, config.data.loader.workers)
    measured, unmeasured = _measured(data, numbers, end, cost)
    needed = None if update_seconds is None else data.per_update / update_seconds
    number, reason = recommend(measured, needed)
    return DataProfile(
        config.data.train.kind,
        data.source.facts.samples,
        data.plan.batch.micro_size,
        cpus,
        ranks,
        config.data.loader.workers,
        cost,
        tuple(measured),
        unmeasured,
        needed,
        number,
        reason,
    )


def update_seconds(paths: Iterable[Path]) -> float | None:
    """Return what an update of the last run takes without waiting for data; None: unknown."""
    known = None
    for path in paths:
        if is_run(path) and (split := read_rank_history(path).split()):
            known = sum(split.values()) - split.get("data", 0.0)
    return known or None


def settings(cpus: int, configured: int) -> list[int]:
    """Return the numbers of workers to measure: 0, 1, 2, 4 ..., the CPUs of a rank, and the configured one."""
    most = max(1, cpus)
    powers = [2**power for power in range(most.bit_length())]
    return sorted({0, *powers, most, configured})


def recommend(speeds: Sequence[LoaderSpeed], needed: float | None) -> tuple[int | None, str]:
    """Return the number of workers to set, and why."""
    if not speeds:
        return None, ""
    best = max(speeds, key=lambda speed: speed.samples)
    if needed is not None:
        keeps_up = (each for each in speeds if each.samples >= needed * (_SPARE if each.workers else _UNNOTICED))
        if (speed := next(keeps_up, None)) is not None:
            return speed.workers, f"the fewest that keep up: {speed.samples / needed:.1f} times what updates need"
        return best.workers, f"the fastest: {best.samples / needed:.1f} times what updates need"
    fewest = next(speed for speed in speeds if speed.samples >= _ENOUGH * best.samples)
    return fewest.workers, f"the fewest within {1 - _ENOUGH:.0%} of the fastest"


# --- the run's data -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _OpenedData:
    config: Config
    source: Source
    objective: EvaluatedObjective
    plan: Plan

    @property
    def per_update(self) -> float:
        """Samples of a rank in an update."""
        return self.plan.batch.global_size / self.plan.mesh.shares

    def after(self, read: int) -> Progress:
        """Return the progress at the next update after a rank has read N samples."""
        steps = math.ceil(read / self.per_update)
        return Progress(steps, steps * self.plan.batch.global_size)

    def loader(self, options: Loader) -> TrainingLoader:
        """Return the first rank's loader, on the CPU."""
        config, options = self.config, options.model_copy(update={"pin_memory": "auto"})
        section = config.data.model_copy(update={"loader": options})
        cpu, count = torch.device("cpu"), self.objective.count
        return TrainingLoader(self.source, self.plan.batch, 0, config.run.seed, section, cpu, count)


def _opened(config: Config, given: UserObjects) -> _OpenedData:
    """Open the data as a run does, with a model without values."""
    alone = config.with_values(data={"evaluation": {}})
    own = users_model(config, given)
    sources = open_sources(alone, given, own)
    model = own or sketch_model(config.model, sources[0].facts, trust_remote_code=given.trust_remote_code)
    ranks = choose_ranks(config.launch)
    machine = Machine(memory=memory_here(config, ranks))
    plan = make_plan(alone, ranks, sources[0].facts, parameter_facts(model), machine)
    objective, source, _ = make_objective(alone, sources, given, model)
    return _OpenedData(config, source, objective, plan)


# --- measurements -------------------------------------------------------------------------------------------------


def _cost(data: _OpenedData, seconds: float) -> SampleCost:
    deadline = time.perf_counter() + seconds
    read, total = 0, 0.0
    batches: list[tuple[int, float]] = []
    with suppress(TimeIsUp), items_timed(data.source, deadline) as items:
        for request in data.loader(data.config.data.loader).requests(Progress()):
            start = time.perf_counter()
            samples = fetch(data.source, request).samples
            if samples:
                took = time.perf_counter() - start
                batches.append((int(request.indices[0]), took / samples))
                read, total = read + samples, total + took
            if batches and time.perf_counter() > deadline:
                break
    if not batches:  # the time is over within the first
        read, total = len(items), sum(took for _, took in items)
    units = items or batches
    ordered = sorted(took for _, took in units)
    slowest_index, slowest = max(units, key=lambda unit: unit[1])
    share = min(1.0, sum(took for _, took in items) / total)
    return SampleCost(
        read,
        total / read,
        ordered[math.ceil(0.95 * len(ordered)) - 1],
        slowest,
        slowest_index,
        bool(items),
        {"items": share, "collate": 1 - share} if items else {},
    )


def _measured(data: _OpenedData, numbers: Sequence[int], end: float, cost: SampleCost) -> tuple[list[LoaderSpeed], str]:
    speeds: list[LoaderSpeed] = []
    read = cost.samples
    micro_batch = cost.mean * data.plan.batch.micro_size
    for place, number in enumerate(numbers):
        share = (end - time.perf_counter()) / (len(numbers) - place)
        if micro_batch > share:
            rest = ", ".join(map(str, numbers[place:]))
            return speeds, f"not measured with {rest} workers: a micro-batch takes {micro_batch:.3g} s; raise --seconds"
        speed, more = _speed(data, number, share, data.after(read))
        speeds.append(speed)
        read += more
    return speeds, ""


def _speed(data: _OpenedData, workers: int, seconds: float, progress: Progress) -> tuple[LoaderSpeed, int]:
    options = data.config.data.loader.model_copy(update={"workers": workers})
    began = time.perf_counter()
    batches = (batch for batch in data.loader(options).micro_batches(progress) if batch.samples)
    read = next(batches).samples
    first = time.perf_counter() - began
    for _ in range(workers * options.prefetch):  # ready, or nearly so: what follows is as fast as the workers are
        if time.perf_counter() - began > seconds / 2:
            break
        read += next(batches).samples
    samples = tokens = 0
    start = time.perf_counter()
    while not samples or time.perf_counter() - began < seconds:
        batch = next(batches)
        samples, tokens = samples + batch.samples, tokens + batch.tokens
    elapsed = time.perf_counter() - start
    ahead = workers * options.prefetch * data.plan.batch.micro_size
    return LoaderSpeed(workers, samples / elapsed, tokens / elapsed, first), read + samples + ahead


# --- text -----------------------------------------------------------------------------------------------------------


def data_lines(profile: DataProfile) -> Iterator[str]:
    """Yield the profile for people."""
    shared = f", shared by {profile.ranks:,} ranks" if profile.ranks > 1 else ""
    yield (
        f"data of kind {profile.kind}, {profile.samples:,} samples, in micro-batches of {profile.micro_size:,}; "
        f"{formatting.counted(profile.cpus, 'CPU')}{shared}"
    )
    cost = profile.cost
    which = "" if cost.by_sample else "in the micro-batch from "
    yield (
        f"a sample: {short_time(cost.mean)} on average, over {cost.samples:,}; 95 % take at most "
        f"{short_time(cost.slow)}; the slowest, {which}sample {cost.slowest_index}, {short_time(cost.slowest)}"
    )
    if cost.stages:
        yield "the time: " + ", ".join(f"{name} {share:.0%}" for name, share in cost.stages.items())
    if profile.settings:
        rows = [["workers", "samples/s", "tokens/s", "first batch in", ""]]
        for speed in profile.settings:
            mark = "<- data.loader.workers" if speed.workers == profile.configured else ""
            speeds = formatting.short(speed.samples), formatting.short(speed.tokens)
            rows.append([str(speed.workers), *speeds, short_time(speed.first), mark])
        yield from ("", *formatting.aligned(rows, left={4}))
    yield ""
    if profile.unmeasured:
        yield profile.unmeasured
    if profile.needed is not None:
        yield f"the model's updates need {formatting.short(profile.needed)} samples/s on this rank"
    if profile.recommended is not None:
        yield f"recommended: data.loader.workers: {profile.recommended} ({profile.reason})"


class TimeIsUp(BaseException):
    """The time for reading samples is over. No `except Exception` of a dataset catches it."""


class _TimedItems:
    def __init__(self, dataset: Any, deadline: float) -> None:
        self._dataset = dataset
        self._deadline = deadline
        self.items: list[tuple[int, float]] = []

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        began = time.perf_counter()
        if began > self._deadline:
            raise TimeIsUp
        item = self._dataset[index]
        self.items.append((index, time.perf_counter() - began))
        return item

    def __getitems__(self, indices: Sequence[int]) -> Any:
        dataset = self._dataset
        if isinstance(dataset, Subset) and not callable(getattr(type(dataset.dataset), "__getitems__", None)):
            return [self[index] for index in indices]  # as it does itself
        return dataset.__getitems__(indices)


@contextmanager
def items_timed(source: Source, deadline: float) -> Iterator[list[tuple[int, float]]]:
    """Yield the list of (index, seconds) of the items that are read in the block; others than items aren't timed.

    Raises TimeIsUp if an item is read after the deadline, on time.perf_counter.
    """
    while isinstance(source, PreparedSource | SkippingSource):
        source = source.source
    if not isinstance(source, ItemSource):
        yield []
        return
    timed = _TimedItems(source.dataset, deadline)
    with patch.object(source, "dataset", timed):
        yield timed.items
