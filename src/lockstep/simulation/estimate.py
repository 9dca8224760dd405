"""The memory of a run before it starts: the product's own updates on the simulated device, as the rank that needs most.

config + ranks  -->  a config for each strategy, with few micro-batches an update
                -->  two updates as the first rank, or as the first of each pipeline stage
                -->  bytes by category at the peak; if it doesn't fit, the smallest change that makes it fit
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast
from unittest.mock import patch

import torch
from pydantic import BaseModel
from torch import nn

from lockstep.assembly.adapters import lower_frozen
from lockstep.assembly.companion import companion_facts
from lockstep.assembly.planning import data_facts
from lockstep.config.schema import Parallel
from lockstep.core.errors import ConfigError
from lockstep.core.formatting import size
from lockstep.core.processes import in_forks, may_fork
from lockstep.launch.devices import count_cores
from lockstep.models.build import parameter_facts, sketch_model
from lockstep.plan.choosing import USABLE, Decision
from lockstep.plan.plan import Machine, make_plan
from lockstep.plan.stated_facts import facts_of_config, sizes_of_config
from lockstep.simulation import device
from lockstep.simulation.failing import Unpredictable, UserCodeFails, explained
from lockstep.simulation.made_up import made_up_data
from lockstep.simulation.reserved import reserved_of
from lockstep.simulation.timing import step_time
from lockstep.simulation.trace import StepTrace
from lockstep.simulation.updates import UPDATES, peak_of_rank
from lockstep.strategies.record import ELEMENT_BYTES, resolved
from lockstep.strategies.registry import find_strategy, strategies, written_name

if TYPE_CHECKING:
    from lockstep.assembly.user_objects import UserObjects
    from lockstep.config.schema import Config
    from lockstep.core.records import DataFacts, ParameterFacts
    from lockstep.plan.choosing import Decision
    from lockstep.plan.gpus import GPUCluster
    from lockstep.plan.modules import ModuleParameters
    from lockstep.plan.plan import Plan
    from lockstep.simulation.memory import Peak
    from lockstep.simulation.timing import StepTime
    from lockstep.strategies.record import Strategy, Variant

T = TypeVar("T")
Extent = Literal["all", "planned"]
"""The strategies to simulate."""

_MICRO_BATCHES = 2  # with more, an update takes longer and holds nothing more
_STRATEGY = "parallel.strategy"
_FUSED = {"gelu_new": "gelu_pytorch_tanh", "gelu_fast": "gelu_pytorch_tanh"}
"""Activations of transformers in several kernels, and the same function in one."""


@dataclass(frozen=True, slots=True)
class StrategyMemory:
    """The memory of the rank that needs most of it under a strategy.

    Attributes:
        name: The name of the strategy's variant, as in the plan.
        planned: Whether it is the config's own.
        peak: None if it can't be simulated.
        fits: Whether a GPU has what the rank reserves, or, of an unknown one, whether the peak takes at most nine
            tenths of a rank's memory; None if that is unknown.
        note: The change that makes it fit, or why it can't be simulated; may be empty.
        time: Of a step on the cluster, if one is named.
        modules: The whole model's parameters by module and dtype.
        fails: Whether the user's own code raises; the note says where.
    """

    name: str
    planned: bool
    peak: Peak | None
    fits: bool | None
    note: str = ""
    modules: tuple[ModuleParameters, ...] = ()
    fails: bool = False
    time: StepTime | None = None

    def as_json(self) -> dict[str, Any]:
        """Return it for programs: only plain values."""
        peak = self.peak
        categories = {} if peak is None else {f"{name}_bytes": size for name, size in peak.by_category.items()}
        return {
            "name": self.name,
            "planned": self.planned,
            "peak_bytes": None if peak is None else peak.bytes,
            "fits": self.fits,
            **categories,
            **({} if peak is None or peak.reserved is None else peak.reserved.as_json()),
            "note": self.note,
            **({} if self.time is None else self.time.as_json()),
        }


@dataclass(frozen=True, slots=True)
class Estimator:
    """Estimates the memory of a run's ranks.

    Attributes:
        memory: Bytes of each rank; None: unknown.
        device_type: `cpu`: as ranks compute on the CPU.
        decision: What `auto` takes, if that is known.
        companion: The parameters of a frozen second model.
        cluster: The GPUs that a step is timed for; None: it isn't.
        has_length: Whether the run's length is known; else its data has only the sizes of a step.
        fused: Changes of the model's config that compute the same in fewer kernels, and save what lies between them.
    """

    config: Config
    ranks: int
    facts: DataFacts
    parameters: Sequence[ParameterFacts]
    given: UserObjects
    memory: int | None = None
    device_type: str = device.NAME
    companion: Sequence[ParameterFacts] = ()
    decision: Decision | None = None
    cluster: GPUCluster | None = None
    has_length: bool = True
    fused: Mapping[str, object] = field(default_factory=dict)

    def estimates(self, extent: Extent = "all") -> Iterator[StrategyMemory]:
        """Yield the memory under the config's own strategy, then under the others that its ranks can have."""
        planned = self.planned(self.config)
        rows, imports = [partial(self._estimate, planned.variant, self.config, planned=True)], set[str]()
        for strategy in strategies() if extent == "all" else ():
            for variant in strategy.variants if bool(strategy.combines.one_process) == (self.ranks == 1) else ():
                if variant.name != planned.variant and variant.mesh != "hybrid":
                    config = under(self.config, strategy, variant)
                    rows.append(partial(self._estimate, variant.name, config, planned=False))
                    imports.add(strategy.hooks.import_on_cpu)
        for row in side_by_side(rows, imports - {""}):
            yield replace(row, modules=planned.modules)

    def planned(self, config: Config) -> Plan:
        """Return the plan of a config on these ranks."""
        machine = Machine(memory=self.memory, decision=self.decision)
        plan = make_plan(config, self.ranks, self.facts, self.parameters, machine, self.companion)
        return plan if self.has_length else replace(plan, steps=None)

    def too_large(self, config: Config) -> str:
        """Return why a lower bound of what a rank holds is more than its memory; empty: it isn't."""
        plan = self.planned(config)
        strategy = find_strategy(plan.strategy)
        options, sharding = strategy.options_of(config.parallel), strategy.variant(config.parallel).state
        if self.memory is None or strategy.memory.offloads(options):
            return ""
        gathered, reduced = strategy.memory.element_bytes(options)
        state = plan.placement
        parts = {"training state": state.total}
        if sharding.stays_gathered:
            width = gathered or ELEMENT_BYTES.get(config.precision.compute, 2)  # auto: bf16 where there is one
            widths = ((each.elements, min(width, each.element_bytes)) for each in self.parameters if not each.quantized)
            parts["gathered parameters"] = sum(map(prod, widths)) // plan.mesh.pieces
        if sharding.gradients and plan.batch.accumulation > 1 and strategy.memory.accumulates_whole(options):
            elements = sum(each.elements for each in self.parameters if each.trainable)
            parts["whole gradients"] = reduced * elements // plan.mesh.pieces - state.gradients
        if (held := sum(parts.values())) <= self.memory:
            return ""
        return f"its {' and '.join(parts)} alone take{'s' * (len(parts) == 1)} {size(held)}"

    def _estimate(self, name: str, config: Config, *, planned: bool) -> StrategyMemory:
        refusal = ""
        try:
            try:
                if not planned and (why := self.too_large(config)):
                    return StrategyMemory(name, planned, None, False, why)
                peak, time = self.simulated(config)
            except ConfigError as error:  # a combination that was never tested has a peak, too
                refusal = str(error).splitlines()[0]
                config = config.with_values(run={"allow_untested": True})
                peak, time = self.simulated(config)
        except ConfigError:
            return StrategyMemory(name, planned, None, None, refusal)
        except Unpredictable as error:
            fails = isinstance(error, UserCodeFails)
            return StrategyMemory(name, planned, None, None, refusal or str(error), fails=fails)
        fits = self.fits(peak)
        note = refusal or (self.remedy(config) if planned and fits is False else "")
        if config.model.compile and not note:
            note = "of the model without torch.compile"
        if self.fused and planned and not note:
            note = f"{_shown(self.fused)} computes the same in fewer kernels, with less memory and time"
        return StrategyMemory(name, planned, peak, fits, note, time=time)

    def step_time(self, config: Config, cluster: GPUCluster) -> StepTime:
        """Return the time of a step on a cluster; raises as `peak` does."""
        return cast("StepTime", replace(self, cluster=cluster).simulated(config)[1])

    def simulated(self, config: Config) -> tuple[Peak, StepTime | None]:
        """Return the peak, and the time of a step if there is a cluster; raises as `peak` does."""
        traces, cluster = list[StepTrace](), self.cluster
        peak = self.peak(config, traces)
        if cluster is None:
            return peak, None
        accumulation = self.planned(config).batch.accumulation
        times = (step_time(trace, cluster, accumulation, stages=len(traces)) for trace in traces)
        return peak, max(times, key=lambda time: time.seconds)  # of the slowest stage

    def peak(self, config: Config, traces: list[StepTrace] | None = None) -> Peak:
        """Return the peak of the rank that needs most, from a shortened run; raises ConfigError or Unpredictable.

        Args:
            traces: Receives the work of a step, by pipeline stage, if there is a cluster to time it for.
        """
        plan = self.planned(config)
        if config.memory.activation_checkpointing.mode == "budget":
            raise Unpredictable("not simulated: torch's compiler selects what a budget recomputes")
        return self.exactly(_shortened(readable(config, self.facts), plan), UPDATES, traces)

    def exactly(self, config: Config, updates: int, traces: list[StepTrace] | None = None) -> Peak:
        """Return the peak of the rank that needs most over N updates; raises as `peak` does."""
        self.planned(config)
        if config.model.quantization is not None:
            raise Unpredictable(
                "not simulated: bitsandbytes needs real weights; the bytes of each part are counted above"
            )
        try:
            return max(self._peaks(config, updates, traces), key=taken)
        except (ConfigError, Unpredictable):
            raise
        except Exception as error:  # a model, or torch without data, may raise anything
            raise explained(error) from error

    def _peaks(self, config: Config, updates: int, traces: list[StepTrace] | None) -> list[Peak]:
        plan = self.planned(config)
        stage_of = [plan.mesh.coordinates(rank)["pipeline"] for rank in range(self.ranks)]
        peaks = []
        for stage in range(plan.mesh.pipeline):
            trace = None if self.cluster is None else StepTrace(plan.batch.accumulation, self.device_type)
            rank = stage_of.index(stage)
            peak = peak_of_rank(config, self.ranks, rank, self.given, updates, self.device_type, trace)
            if trace is not None and self.cluster is not None:
                if self.cluster.gpu.device == "gpu":
                    peak = replace(peak, reserved=reserved_of(trace, self.cluster, self.memory))
                (traces if traces is not None else []).append(trace)
            peaks.append(peak)
        return peaks

    def fits(self, peak: Peak) -> bool | None:
        """Return whether a rank's memory is enough for a peak and what an allocator adds; None: it isn't known."""
        if peak.reserved is not None:
            return peak.reserved.fits
        return None if self.memory is None else peak.bytes <= USABLE * self.memory

    def remedy(self, config: Config) -> str:
        """Return the changes that make the run fit: the cheapest ones that are enough together."""
        taken: dict[str, object] = {}
        for change in _changes(config, self.planned(config), self.fused):
            fits = self._fits_with(config, {**taken, **change})
            if fits is None:
                continue
            taken.update(change)
            if fits:
                needed = self._needed(config, taken, change)
                return f"it fits with {_shown(needed)}"
        return "no change of micro-batch, activation checkpointing or strategy makes it fit; start more ranks"

    def _needed(self, config: Config, taken: Mapping[str, object], last: Mapping[str, object]) -> dict[str, object]:
        needed = dict(taken)
        for key in sorted(taken.keys() - last.keys()):
            without = {other: value for other, value in needed.items() if other != key}
            if self._fits_with(config, without):
                needed = without
        return needed

    def _fits_with(self, config: Config, change: Mapping[str, object]) -> bool | None:
        try:
            return self.fits(self.peak(_with(config, change)))
        except (ConfigError, Unpredictable):
            return None


def side_by_side(functions: Sequence[Callable[[], T]], imports: Iterable[str] = ()) -> Iterator[T]:
    """Yield the results of functions, which run in copies of this process, one for each core, if it can be copied.

    Args:
        imports: Functions that import what the copies need, by name.
    """
    if len(functions) > 1 and count_cores() > 1 and may_fork():
        with patch.dict(os.environ), suppress(Exception):  # a copy says what it lacks
            for name in imports:
                resolved(name)(torch.device("cpu"))
        if may_fork():
            return in_forks(functions, count_cores())
    return (function() for function in functions)


def taken(peak: Peak) -> int:
    """Return the bytes that a rank takes of its GPU or, of the CPU's memory, its tensors."""
    return peak.bytes if peak.reserved is None else peak.reserved.total


def under(config: Config, strategy: Strategy, variant: Variant) -> Config:
    """Return the config with another strategy, and that strategy's other options as the config has them."""
    written = config.parallel.model_dump(exclude_unset=True)
    options = {**dict(written.get(strategy.section) or {}), **variant.options}
    parallel = {**written, "data": "auto", "shard": "auto", "strategy": written_name(strategy)}
    if options:
        parallel[strategy.section] = options
    return config.model_copy(update={"parallel": Parallel.model_validate(parallel)})


def _shortened(config: Config, plan: Plan) -> Config:
    micro_batches = min(plan.batch.accumulation, max(_MICRO_BATCHES, plan.mesh.pipeline))
    size = min(config.batch.global_size, plan.batch.micro_size * plan.mesh.shares * micro_batches)
    length = {"steps": 4 * UPDATES, "samples": None, "tokens": None, "epochs": None}
    batch = {"global_size": size, "micro_size": plan.batch.micro_size}
    model, parallel = {"compile": False}, {"strategy": plan.strategy}
    return config.with_values(batch=batch, run=length, data={"evaluation": {}}, model=model, parallel=parallel)


def _changes(config: Config, plan: Plan, fused: Mapping[str, object]) -> Iterator[Mapping[str, object]]:
    size = plan.batch.micro_size
    yield from [fused] * bool(fused)
    if size > 1 or plan.batch.accumulation > 1:
        yield from _options_that_save(config, find_strategy(plan.strategy))
    while size > 1:
        size //= 2
        yield {"batch.micro_size": size}
    if config.memory.activation_checkpointing.mode == "none":
        yield {"memory.activation_checkpointing.mode": "full"}
    last = [strategy for strategy in strategies() if strategy.combines.automatic][-1]
    if plan.ranks > 1 and plan.strategy != last.name:
        yield {_STRATEGY: last.name}
        for option in _options_that_save(config, last):
            yield {_STRATEGY: last.name, **option}
    strategy = last if plan.ranks > 1 else find_strategy(plan.strategy)
    if config.precision.compute in ("auto", "bf16") and strategy.memory.rounds:
        yield {f"parallel.{strategy.section}.{name}": value for name, value in strategy.memory.rounds.items()}


def _options_that_save(config: Config, strategy: Strategy) -> Iterator[dict[str, object]]:
    options = strategy.options_of(config.parallel)
    for name, value in strategy.memory.saves_memory.items():
        if getattr(options, name) != value:
            yield {f"parallel.{strategy.section}.{name}": value}


def _shown(change: Mapping[str, object]) -> str:
    return " and ".join(f"{key}: {value}" for key, value in change.items())


def _with(config: Config, change: Mapping[str, object]) -> Config:
    for key, value in change.items():
        if key == _STRATEGY:
            strategy = find_strategy(str(value))
            config = under(config, strategy, strategy.variants[0])
        else:
            config = _replaced(config, key.split("."), value)
    return config


def _replaced(section: Any, path: Sequence[str], value: object) -> Any:
    name, *rest = path
    if not isinstance(section, BaseModel):  # keys that transformers knows
        return {**(section or {}), name: value}
    return section.model_copy(update={name: _replaced(getattr(section, name), rest, value) if rest else value})


def readable(config: Config, facts: DataFacts) -> Config:
    """Return the config with data that can be read: its own, or made-up batches if it need not be on this machine."""
    if sizes_of_config(config) is None:
        return config
    return config.with_values(data={"train": made_up_data(config, facts)})


def even(share: int, samples: int) -> int:
    """Return the micro-batch of at most this size that divides a share into as few, equal ones."""
    samples = min(samples, share)
    return -(-share // -(-share // samples))


def estimator_of(
    config: Config, ranks: int, memory: int | None, given: UserObjects, cluster: GPUCluster | None = None
) -> Estimator:
    """Return the estimator of a run; a model is described without its weights."""
    whole, sizes = facts_of_config(config), sizes_of_config(config)
    facts = whole or sizes or data_facts(config, given)
    model = given.model if isinstance(given.model, nn.Module) else None
    if model is None and given.model is not None:
        model = cast("nn.Module", cast("Any", given.model)())
    sketch = model or sketch_model(config.model, facts, trust_remote_code=given.trust_remote_code)
    own = parameter_facts(sketch if sketch is model else lower_frozen(sketch, config))
    companion = companion_facts(config, facts, own, trust_remote_code=given.trust_remote_code)
    place = "cpu" if cluster is not None and cluster.gpu.device == "cpu" else device.NAME
    has_length = whole is not None or sizes is None
    known = cast("Any", sketch).config.to_dict() if model is None and config.model.kind == "huggingface" else {}
    fused = {f"model.architecture.{name}": _FUSED[value] for name, value in known.items() if value in [*_FUSED]}
    return Estimator(config, ranks, facts, own, given, memory, place, companion, None, cluster, has_length, fused)
