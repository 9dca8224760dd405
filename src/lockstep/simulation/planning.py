"""The memory of a run, for `lockstep plan` and `lockstep.estimate_memory`: simulated, and measured beside it.

simulated     every strategy, on ranks that needn't exist
measured      real updates on ranks of this machine, with tensors counted in the same way
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Unpack

import torch

from lockstep.assembly.deciding import cluster_of, decides
from lockstep.assembly.planning import memory_here
from lockstep.assembly.user_objects import Objects, UserObjects, user_objects
from lockstep.core.errors import ConfigError, OutOfMemory, Paused, RunFailed, Stopped
from lockstep.core.formatting import aligned, size
from lockstep.core.ranks import RankEnvironment
from lockstep.core.stopping import undo_on_stop
from lockstep.core.terminal import muted_stderr
from lockstep.distributed.memory import peak_memory
from lockstep.launch.devices import choose_ranks, count_accelerators
from lockstep.launch.local import launch
from lockstep.loop.session import components_of
from lockstep.plan.gpus import parse_clusters
from lockstep.simulation import device
from lockstep.simulation.estimate import Estimator, Extent, StrategyMemory, estimator_of, taken
from lockstep.simulation.failing import Unpredictable
from lockstep.simulation.made_up import made_up_texts
from lockstep.simulation.memory import CATEGORIES, HEADS, MemoryLedger, Peak, Watched, resizes_seen
from lockstep.simulation.search import config_title, decide, search, title
from lockstep.simulation.timing import SHARES, StepTime
from lockstep.simulation.updates import run_updates
from lockstep.training.ahead import imports_ahead
from lockstep.training.api import resolved
from lockstep.training.job import opened

if TYPE_CHECKING:
    from lockstep.config.loading import LoadedConfig
    from lockstep.config.schema import Config
    from lockstep.plan.choosing import Decision
    from lockstep.plan.gpus import GPUCluster, Price
    from lockstep.plan.plan import Plan
    from lockstep.simulation.search import Found, Goal
    from lockstep.training.api import ConfigLike

_MEASURED_UPDATES = 3
_SHOWN = 1e-3  # fraction of a peak; a category with more has a column
_LEAST_SHARE = 5e-3  # of a step; a part with more has a column
_LEAST_SHOWN = 0.01  # kWh
_LARGE_NUMBER = 10_000  # shown without decimals
NO_LENGTH = "No hours and cost: the length of the run isn't known without its data; set run.steps or run.tokens."


def estimate_memory(
    config: ConfigLike,
    *,
    ranks: int = 1,
    memory: int | None = None,
    length: int | None = None,
    **objects: Unpack[Objects],
) -> list[StrategyMemory]:
    """Return the peak memory of the rank that needs most, by category, under each strategy that N ranks can have.

    The config's own strategy comes first. No process starts, and a model of any size fits: an accelerator is simulated.

    Args:
        config: a recipe's name, a file, a mapping, or a Config. It need not contain what is passed as an object.
        memory: bytes of each rank; None: unknown.
        length: tokens of a sample of a language model: no dataset is needed, or read; None: as in `data.train`.
        **objects: `model`, `train_dataset`, ...: see `lockstep.Objects`. A module is left as it is.

    Raises:
        ConfigError: the config's own run would be refused.
    """
    checked, given = _with_length(config, user_objects(objects), length)
    return list(estimates_of(estimator_of(checked, ranks, memory, given), None, "all"))


def estimate(
    config: ConfigLike,
    *,
    gpus: str,
    nodes: int = 1,
    price: str | None = None,
    length: int | None = None,
    **objects: Unpack[Objects],
) -> RunEstimate:
    """Return memory, time and cost of a run on GPUs that needn't be here, as `lockstep plan --gpus` does.

    Args:
        config: as of `estimate_memory`, with `length` and the objects.
        gpus: a GPU and how many a node has, such as `H100:8` or `FILE.toml:NAME:8`, or an instance type.
        price: of a GPU, or of the instance, for an hour, such as `2.5USD`.

    Raises:
        ConfigError: the run would be refused, or there is no such GPU.
    """
    [(cluster, of_gpu), *others] = parse_clusters(gpus, str(nodes), price)
    if others:
        raise ConfigError(f"gpus {gpus}: an estimate is of one cluster; ask for each")
    checked, given = _with_length(config, user_objects(objects), length)
    estimator = estimator_of(checked, cluster.ranks, cluster.gpu.memory, given, cluster)
    return estimated(estimator, of_gpu)


@dataclass(frozen=True, slots=True)
class RunEstimate:
    """Memory, time and cost of a run on a cluster.

    Attributes:
        memory: Of the rank that needs most, with the step's `time`; its `note` says why it has neither.
        costs: `tokens_per_second` or `samples_per_second`, `hours`, `kwh`, `cost`, as far as they are known.
    """

    plan: Plan
    memory: StrategyMemory
    costs: Mapping[str, float]

    def as_json(self) -> dict[str, Any]:
        """Return it for programs: only plain values."""
        batch = {"micro_size": self.plan.batch.micro_size, "accumulation": self.plan.batch.accumulation}
        return {**self.memory.as_json(), **batch, **self.costs}


def estimated(estimator: Estimator, price: Price | None) -> RunEstimate:
    """Return the estimate of a run on the estimator's cluster."""
    cluster, decision = estimator.cluster, decision_of(estimator)[0]
    assert cluster is not None, "there are GPUs to time it on"
    [row] = estimates_of(estimator, decision, "planned")
    plan = replace(estimator, decision=decision).planned(estimator.config)
    return RunEstimate(plan, row, {} if row.time is None else run_costs(row.time, plan, cluster, price))


@dataclass(frozen=True, slots=True)
class ClusterRow:
    """A run on one of several clusters.

    Attributes:
        config: In short.
        run: None if the run can't be there; `why` says why.
    """

    cluster: GPUCluster
    price: Price | None
    config: str = ""
    run: RunEstimate | None = None
    why: str = ""
    overlay: Mapping[str, Any] | None = None

    @property
    def fits(self) -> bool:
        return self.run is not None and self.run.memory.time is not None and self.run.memory.fits is not False

    @property
    def note(self) -> str:
        """The reason why the run can't be there or doesn't fit, with what makes it fit; or `tight`."""
        if self.run is None:
            return self.why
        memory = self.run.memory
        if memory.peak is None or self.fits:
            return "tight" if memory.peak and _is_tight(memory.peak, None, memory.fits) else memory.note
        return f"doesn't fit; {memory.note}".removesuffix("; ")

    def as_json(self) -> dict[str, Any]:
        """Return it for programs: only plain values."""
        of = self.cluster
        gpus = {"gpu": of.gpu.name, "per_node": of.per_node, "nodes": of.nodes, "instance": of.instance or None}
        run = {"fits": False, "note": self.why} if self.run is None else self.run.as_json()
        return {**gpus, **run, **({} if self.overlay is None else {"found": self.overlay})}


def row_on(estimator: Estimator, price: Price | None) -> ClusterRow:
    """Return a run under its own strategy on the estimator's cluster. May raise ConfigError."""
    assert estimator.cluster is not None, "there are GPUs to time it on"
    run = estimated(estimator, price)
    mode = estimator.config.memory.activation_checkpointing.mode
    return ClusterRow(estimator.cluster, price, config_title(run.memory.name, run.plan.batch.micro_size, mode), run)


def searched_on(estimator: Estimator, price: Price | None, goal: Goal) -> ClusterRow:
    """Return the best config on the estimator's cluster. May raise ConfigError."""
    assert estimator.cluster is not None, "there are GPUs to search on"
    result = search(estimator, goal)
    if (run := run_of(result, estimator.cluster, price)) is None or result.best is None:
        return ClusterRow(estimator.cluster, price, why="nothing fits")
    return ClusterRow(estimator.cluster, price, title(result.best), run, overlay=result.best.overlay)


def run_of(result: Found, cluster: GPUCluster, price: Price | None) -> RunEstimate | None:
    """Return the estimate of the config that a search has found; None: it has found none."""
    if result.plan is None or result.memory is None or result.memory.time is None:
        return None
    return RunEstimate(result.plan, result.memory, run_costs(result.memory.time, result.plan, cluster, price))


def best_of(rows: Sequence[ClusterRow], goal: str) -> ClusterRow | None:
    """Return the row that is best for a goal of a search, out of those that fit."""

    def rank(row: ClusterRow) -> float:
        assert row.run is not None
        assert row.run.memory.time is not None
        assert row.run.memory.peak is not None
        match goal:
            case "cost" if row.price is not None:
                return row.run.memory.time.seconds * row.cluster.ranks * row.price.per_hour
            case "memory":
                return taken(row.run.memory.peak)
        return row.run.memory.time.seconds

    return min((row for row in rows if row.fits), key=rank, default=None)


def describe_clusters(rows: Sequence[ClusterRow], best: ClusterRow | None) -> str:
    """Return the table for people: a row for each cluster."""
    keys = ("tokens_per_second", "samples_per_second", "mfu", "hours", "kwh", "cost")
    records = [row.as_json() for row in rows]
    known = [key for key in keys if any(key in record for record in records)]
    if known[:2] == [*keys[:2]]:
        known.remove("samples_per_second")
    heads = [key.replace("_per_second", "/s") for key in known]
    lines: list[tuple[str, ...]] = [("", "config", "ms", "reserved", *heads, "")]
    for row, record in zip(rows, records, strict=True):
        seconds, reserved = record.get("step_seconds"), record.get("reserved_bytes") or record.get("peak_bytes")
        if row.price is not None and "cost" in record:
            record["cost"] = row.price.text(record["cost"])
        lines.append(
            (
                str(row.cluster),
                row.config,
                "" if seconds is None else f"{1000 * seconds:,.1f}",
                "" if reserved is None else size(reserved),
                *("" if record.get(key) is None else _shown_value(key, record[key]) for key in known),
                f"{'<- ' if row is best else ''}{row.note}".rstrip(),
            )
        )
    unknown = [NO_LENGTH] if any(row.run is not None and row.run.plan.steps is None for row in rows) else []
    return "\n".join([*aligned(lines, left={0, 1, len(lines[0]) - 1}), *unknown])


def describe_compared(columns: Mapping[str, RunEstimate]) -> str:
    """Return a table with a column for each config, and a row for each value that any of them has."""
    records = [each.as_json() for each in columns.values()]
    keys = dict.fromkeys(key for record in records for key, value in record.items() if value not in (None, "", 0))
    del keys["planned"]
    lines = [("", *columns)]
    for key in keys:
        name = key.removesuffix("_bytes").replace("step_seconds", "step").replace("_seconds", "").replace("_", " ")
        lines.append((name, *(_shown_value(key, record.get(key)) for record in records)))
    unknown = [NO_LENGTH] if any(each.plan.steps is None for each in columns.values()) else []
    return "\n".join([*aligned(lines, left={0}), *unknown])


def _shown_value(key: str, value: Any) -> str:
    if key.endswith("_bytes") and value is not None:
        return size(value)
    if key.endswith("_seconds") and value is not None:
        return f"{1000 * value:,.1f} ms"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return {True: "yes", False: "no", None: "-"}.get(value, str(value))
    return f"{value:.1%}" if key == "mfu" else f"{value:,.4g}" if value < _LARGE_NUMBER else f"{value:,.0f}"


def _with_length(config: ConfigLike, given: UserObjects, length: int | None) -> tuple[Config, UserObjects]:
    if length is None:
        return resolved(config, given), given
    checked = resolved(config, replace(given, train_dataset=()))
    return checked, replace(given, train_dataset=made_up_texts(checked, given.model, length))


def estimator_for(
    loaded: LoadedConfig, memory: int | None, cluster: GPUCluster | None = None, *, trust_remote_code: bool
) -> Estimator:
    """Return the estimator of a command's run; `memory` of None: what a rank has on the cluster, or on this machine."""
    config, given = loaded.config, UserObjects(trust_remote_code=trust_remote_code)
    if cluster is not None:
        return estimator_of(config, cluster.ranks, memory or cluster.gpu.memory, given, cluster)
    ranks = choose_ranks(config.launch)
    kind, devices = count_accelerators(config.launch)
    here = cluster_of(torch.device(kind), ranks, ranks) if devices >= ranks and not memory else None
    return estimator_of(config, ranks, memory or memory_here(config, ranks), given, here)


def decision_of(estimator: Estimator) -> tuple[Decision | None, str]:
    """Return what `auto` takes; or None, and why it isn't known, which is empty if `auto` has no choice."""
    if estimator.memory is None or not decides(estimator.config, estimator.ranks):
        return None, ""
    try:
        with muted_stderr():
            return decide(estimator), ""
    except Unpredictable as reason:
        return None, str(reason)


def estimates_of(estimator: Estimator, decision: Decision | None, extent: Extent) -> Iterator[StrategyMemory]:
    """Yield the memory of a command's run under its own strategy, then under others."""
    rows = replace(estimator, decision=decision).estimates(extent)
    while True:
        with muted_stderr():  # of torch's remarks on a device that it doesn't know
            row = next(rows, None)
        if row is None:
            return
        yield row


# --- text ---------------------------------------------------------------------------------------------------------


def describe_memory(rows: Sequence[StrategyMemory], memory: int | None) -> str:
    """Return the table for people: a row for each strategy, a column for each category that any of them has."""
    peaks = [row.peak for row in rows if row.peak is not None]
    columns = [name for name in CATEGORIES if any(peak.by_category[name] > peak.bytes * _SHOWN for peak in peaks)]
    reserves = any(peak.reserved is not None for peak in peaks)
    heads = [*(HEADS.get(name, name) for name in columns), "peak", *["reserved"] * reserves]
    lines = [f"{'peak of a rank':<14}" + "".join(f"{head:>12}" for head in heads) + "  fits"]
    for row in rows:
        mark = "  <-" if row.planned else ""
        if row.peak is None:
            note = "the same" if row.note == rows[0].note and row != rows[0] else row.note
            lines.append(f"{row.name:<14}  {note}{'  no' * (row.fits is False)}{mark}")
            continue
        sizes = [*(row.peak.by_category[name] for name in columns), row.peak.bytes]
        sizes += [] if row.peak.reserved is None else [row.peak.reserved.total]
        tight = _is_tight(row.peak, memory, row.fits)
        fits = "tight" if tight else {True: "yes", False: "no", None: "?"}[row.fits]
        lines.append(f"{row.name:<14}" + "".join(f"{size(number):>12}" for number in sizes) + f"  {fits}{mark}")
    if memory is not None and any(row.peak and _is_tight(row.peak, memory, row.fits) for row in rows):
        slow = "the allocator gives memory back and asks for it again, for which the GPU waits"
        guess = f"over nine tenths of {size(memory)}; an allocator needs about a tenth"
        lines.append(f"tight: {slow if reserves else guess}")
    if (reserved := next((row.peak.reserved for row in rows if row.peak and row.peak.reserved), None)) is not None:
        parts = {"CUDA": reserved.context, "NCCL": reserved.nccl, "workspaces of cuBLAS": reserved.workspaces}
        of = ", ".join(f"{size(number)} of {name}" for name, number in parts.items() if number)
        lines.append(f"reserved: by torch's allocator, with what it keeps; with {of}")
    lines += [f"\n{row.name}: {row.note}." for row in rows if row.planned and row.peak is not None and row.note]
    return "\n".join(lines)


def _is_tight(peak: Peak, memory: int | None, fits: bool | None) -> bool:
    if peak.reserved is not None:
        return bool(fits) and peak.reserved.releases > 0
    return fits is False and memory is not None and peak.bytes <= memory


def describe_time(rows: Sequence[StrategyMemory], cluster: GPUCluster, plan: Plan, price: Price | None) -> str:
    """Return the table of a step's time for people: a row for each strategy, a column for each part that any has."""
    timed = [(row, row.time) for row in rows if row.time is not None]
    parts = [part for part in SHARES if any(step.parts[part] > _LEAST_SHARE * step.seconds for _, step in timed)]
    costs = ["hours"] * (plan.steps is not None) + ["cost"] * (plan.steps is not None and price is not None)
    head = ["step on", "ms", *parts, f"{'samples' if plan.tokens is None else 'tokens'}/s", "MFU", *costs, ""]
    table, more = [[f"{head[0]} {cluster}", *head[1:]]], list[str]()
    for row, step in timed:
        run = run_costs(step, plan, cluster, price)
        values = [f"{1000 * step.seconds:,.1f}", *(f"{step.parts[part] / step.seconds:.0%}" for part in parts)]
        speed = run.get("tokens_per_second", run["samples_per_second"])
        values += [f"{speed:,.0f}", f"{step.mfu:.1%}"]
        values += [f"{run['hours']:,.1f}"] * ("hours" in run)
        values += [price.text(run["cost"])] if price is not None and "cost" in run else []
        marks = ["<-"] * row.planned + ["doesn't fit"] * (row.fits is False)
        table.append([row.name, *values, " ".join(marks)])
        more += _a_day(run) if row.planned else []
    more += [NO_LENGTH] if plan.steps is None else []
    return "\n".join([*aligned([tuple(line) for line in table], left={0}), *more])


def _a_day(run: Mapping[str, float]) -> list[str]:
    sentences = {"tokens_per_day": "{:,.0f} tokens a day", "kwh": "{:,.3g} kWh in all, at full power"}
    known = [text.format(run[key]) for key, text in sentences.items() if run.get(key, 0.0) > _LEAST_SHOWN]
    return [", ".join(known)] if known else []


def run_costs(step: StepTime, plan: Plan, cluster: GPUCluster, price: Price | None) -> dict[str, float]:
    """Return samples, and tokens, per second; and hours, kWh and cost, if the run's length is known."""
    values = {"samples_per_second": plan.batch.global_size / step.seconds}
    if plan.tokens is not None and plan.samples:
        values["tokens_per_second"] = values["samples_per_second"] * plan.tokens / plan.samples
        values["tokens_per_day"] = 86400 * values["tokens_per_second"]
    if plan.steps is not None:
        hours = plan.steps * step.seconds / 3600
        values["hours"] = hours
        if cluster.gpu.watts:
            values["kwh"] = hours * cluster.ranks * cluster.gpu.watts / 1000
        if price is not None:
            values["cost"] = hours * cluster.ranks * price.per_hour
    return values


def describe_measured(predicted: Peak, measured: Peak, *, on_cpu: bool) -> str:
    """Return predicted and measured bytes side by side, and the devices that both are for."""
    own = "of updates on this machine's CPU (its kernels hold other bytes than an accelerator's)"
    lines = [f"peak of a rank, {own if on_cpu else 'of updates on the accelerators of this machine'}:"]
    lines += [f"{'':<14}{'predicted':>14}{'measured':>14}{'ratio':>8}"]
    pairs = [(HEADS.get(name, name), predicted.by_category[name], measured.by_category[name]) for name in CATEGORIES]
    for name, expected, actual in [*pairs, ("peak", predicted.bytes, measured.bytes)]:
        if expected or actual:
            ratio = f"{actual / expected:.3f}" if expected else "-"
            lines.append(f"{name:<14}{size(expected):>14}{size(actual):>14}{ratio:>8}")
    return "\n".join(lines)


# --- measured -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MeasuredMemory:
    """The memory of the rank that needs most, over three updates on this machine.

    Attributes:
        predicted: None: it can't be simulated; `unpredictable` says why.
        held: Bytes that the rank held in all: of its process on the CPU, of torch's allocator on an accelerator.
    """

    predicted: Peak | None
    unpredictable: str
    measured: Peak
    held: int
    ranks: int
    on_cpu: bool


def measured_beside_predicted(loaded: LoadedConfig, *, trust_remote_code: bool) -> MeasuredMemory:
    """Return the predicted and the measured peak of the rank that needs most, over three updates on this machine."""
    given = UserObjects(trust_remote_code=trust_remote_code)
    length = {"steps": _MEASURED_UPDATES, "samples": None, "tokens": None, "epochs": None}
    estimator = estimator_for(loaded, None, trust_remote_code=trust_remote_code)
    config = settled(loaded.config.with_values(run=length), estimator)
    ranks, on_cpu = choose_ranks(config.launch), not count_accelerators(config.launch)[1]
    estimator = replace(estimator, device_type="cpu" if on_cpu else device.NAME)
    predicted, why = None, ""
    try:
        predicted = estimator.exactly(config, _MEASURED_UPDATES)
    except Unpredictable as error:
        why = str(error)
    if predicted is not None and estimator.memory is not None and predicted.bytes > estimator.memory:
        takes = f"a rank would take {size(predicted.bytes)}, and has {size(estimator.memory)} here"
        raise RunFailed(f"{takes}; measure fewer ranks, or a smaller model")
    peak, held = _measured(config, given, ranks)
    return MeasuredMemory(predicted, why, peak, held, ranks, on_cpu)


def _measured(config: Config, given: UserObjects, ranks: int) -> tuple[Peak, int]:
    """Run updates in new processes; return peak and held bytes of the rank that needs most."""
    folder = Path(tempfile.mkdtemp(prefix="lockstep-plan-"))
    remove = partial(shutil.rmtree, folder, ignore_errors=True)
    try:
        with undo_on_stop(remove):
            entry = partial(_measure_rank, config, given, folder)
            code = launch(entry, ranks, config.launch, None, own_process=True, preload=imports_ahead(config)).show()
            records = [json.loads(file.read_text()) for file in folder.glob("*.json")]
    finally:
        remove()
    if code in (Stopped.exit_code, Paused.exit_code):
        raise Stopped("stopped")
    for record in records:
        if "refused" in record:
            raise OutOfMemory(record["refused"]) if record["memory"] else ConfigError(record["refused"])
    if len(records) < ranks:
        raise RunFailed(f"memory can't be measured: the ranks ended with exit code {code}")
    return max(((Peak(**record["peak"]), record["held"]) for record in records), key=lambda each: each[0].bytes)


def settled(config: Config, estimator: Estimator) -> Config:
    """Return the config with the strategy and the micro-batch of its plan, which `auto` may take."""
    plan = replace(estimator, decision=decision_of(estimator)[0]).planned(estimator.config)
    return config.with_values(parallel={"strategy": plan.strategy}, batch={"micro_size": plan.batch.micro_size})


def _measure_rank(config: Config, given: UserObjects, folder: Path) -> int:
    """Write the peak and the held bytes of some updates, or why there are none."""
    record: dict[str, Any]
    rank = RankEnvironment.read(os.environ).rank
    try:
        with opened(config, given) as session:
            device = components_of(session).world.device
            ledger = MemoryLedger(device.type)
            with Watched(ledger), resizes_seen(ledger):
                run_updates(session, ledger, _MEASURED_UPDATES)
            held = (
                peak_memory(device) if device.type == "cpu" else torch.get_device_module(device).max_memory_reserved()
            )
            record = {"peak": asdict(ledger.peak()), "held": held}
    except (ConfigError, OutOfMemory) as refusal:
        record = {"refused": str(refusal), "memory": isinstance(refusal, OutOfMemory)}
    (folder / f"{rank}.json").write_text(json.dumps(record))
    return 0
