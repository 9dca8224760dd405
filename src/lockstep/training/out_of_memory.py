"""The message of an out-of-memory error: the requested and the free memory, where it ran out, and what to change.

    RuntimeError: ... you tried to allocate 6442450944 bytes ...
    --> out of memory in the backward pass of micro-batch 2 of 4, update 13: 6.0 GiB were requested, and 1.2 of 4.0 GiB
        were free (ulimit -v limit). Set batch.micro_size to 4 (it is 8). If that is not enough: set ...

The cheapest remedy comes first: a smaller micro-batch leaves the run as it is, activation checkpointing costs time,
sharding the training state takes ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lockstep.core.control_groups import SHARED_MEMORY
from lockstep.core.errors import OutOfMemory
from lockstep.core.formatting import size
from lockstep.core.out_of_memory import (
    error_location,
    lacks_shared_memory,
    out_of_memory_cause,
    requested_bytes,
)
from lockstep.models.blocks import repeated_blocks
from lockstep.models.building_objectives import least_samples
from lockstep.plan.batch import half, smallest_micro_batch
from lockstep.strategies.registry import AUTO, find_strategy
from lockstep.training.session import components_of

if TYPE_CHECKING:
    import torch

    from lockstep.config.schema import Config
    from lockstep.core.control_groups import MemoryLimit
    from lockstep.core.out_of_memory import Phase
    from lockstep.training.components import Components
    from lockstep.training.session import Session
    from lockstep.training.user_objects import UserObjects

_PREDICTION_SECONDS = 45.0
_TOO_LARGE = "One sample alone would need"
_IN_UPDATE = ("forward", "backward", "update", None)  # None: before the first update


def least_micro_size(components: Components) -> int:
    """Return the smallest `batch.micro_size` with which no micro-batch has too few samples for the model."""
    least, plan = least_samples(components.sharding.state.model), components.plan
    batch, current = plan.batch, plan.batch.micro_size
    if least == 1:
        return 1
    updates = [batch.global_size]
    rest = plan.epoch_samples % batch.global_size
    ends_epoch = plan.steps is None or plan.steps > plan.epoch_samples // batch.global_size
    if rest and ends_epoch and smallest_micro_batch(rest, current, batch.ranks) >= least:
        updates.append(rest)
    for smaller in range(1, current):
        if all(smallest_micro_batch(samples, smaller, batch.ranks) >= least for samples in updates):
            return smaller
    return current


def factors_of(config: Config, ranks: int, session: Session | None) -> MemoryFactors:
    """Return what determines how much memory a rank needs; without a session, as far as the config does."""
    factors = memory_factors(config, ranks)
    if session is None:
        return factors
    components = components_of(session)
    return replace(
        factors,
        micro_size=components.plan.batch.micro_size,
        least_size=least_micro_size(components),
        evaluation_size=components.evaluator.micro_size,
        strategy=components.plan.strategy,
        can_checkpoint=factors.can_checkpoint and bool(repeated_blocks(components.sharding.state.model)),
    )


@dataclass(frozen=True, slots=True)
class MemoryFactors:
    """The settings that determine how much memory a rank needs.

    Attributes:
        micro_size, evaluation_size: samples per forward, in training and in an evaluation.
        strategy: as resolved, or `auto` where it isn't resolved yet.
        can_checkpoint: whether the model has repeated blocks whose activations are kept.
        least_size: the smallest `batch.micro_size` with which the model can be trained.
        workers: worker processes of the data loader.
    """

    micro_size: int
    evaluation_size: int
    ranks: int
    strategy: str
    can_checkpoint: bool
    workers: int
    least_size: int = 1


def memory_factors(config: Config, ranks: int) -> MemoryFactors:
    """Return the factors as far as the config determines them; `auto` is a rank's whole share of the global batch."""
    share = -(-config.batch.global_size // ranks)
    micro = share if config.batch.micro_size == "auto" else min(config.batch.micro_size, share)
    return MemoryFactors(
        micro_size=micro,
        evaluation_size=micro if config.evaluation.micro_size == "auto" else config.evaluation.micro_size,
        ranks=ranks,
        strategy=config.parallel.strategy,
        can_checkpoint=config.memory.activation_checkpointing.mode == "none",
        workers=config.data.loader.workers,
    )


def explain(error: BaseException, factors: MemoryFactors, device: torch.device) -> OutOfMemory | None:
    """Return the failure to raise instead of `error`; None if it isn't an out-of-memory error."""
    cause = out_of_memory_cause(error)
    if cause is None:
        return None
    from lockstep.distributed.memory import memory_limit_of, peak_memory, shared_memory

    limit = (shared_memory() if lacks_shared_memory(cause) else None) or memory_limit_of(device)
    place, requested = error_location(error), requested_bytes(cause)
    phase = None if place is None else place.phase
    where = f" {place}" if place is not None else " while the model and its training state were set up"
    need = f"{size(requested)} were requested, and " if requested is not None else ""
    free = f"{size(limit.free)} of {size(limit.total)} were free ({limit.owner} limit)"
    is_smallest = phase in _MICRO_SIZE_KEYS and _is_smallest(factors, phase)
    smallest = f"; {_why_smallest(factors, phase)}" if is_smallest else ""
    message = f"out of memory{where}: {need}{free}; this rank's peak was {size(peak_memory(device))}{smallest}."
    advised = advice(factors, phase, requested, limit)
    if advised.startswith(_TOO_LARGE):
        return OutOfMemory(f"{message} {advised}")
    if phase not in _IN_UPDATE:
        return OutOfMemory(f"{message} {advised}", too_large=sizes_too_large(error, factors))
    return OutOfMemory(message, advised, sizes_too_large(error, factors))


def sizes_too_large(error: BaseException, factors: MemoryFactors) -> dict[str, int]:
    """Return the size of micro-batches, by its key, with which memory ran out and smaller ones may do; or nothing."""
    place = error_location(error)
    phase = None if place is None else place.phase
    if out_of_memory_cause(error) is None:
        return {}
    key = "batch.micro_size" if phase == "update" else _MICRO_SIZE_KEYS.get(phase or "")
    if key is None or _is_smallest(factors, phase):
        return {}
    return {key: _samples(factors, phase)}


def _is_smallest(factors: MemoryFactors, phase: Phase | None) -> bool:
    """Return whether micro-batches can't be halved: they have one sample, or half as many are too few for the model."""
    samples = _samples(factors, phase)
    return samples == 1 or (phase != "evaluation" and half(samples) < factors.least_size)


def _why_smallest(factors: MemoryFactors, phase: Phase | None) -> str:
    if _samples(factors, phase) == 1:
        return "micro-batches have one sample already"
    return "smaller micro-batches would have a single sample, which BatchNorm1d can't be computed of"


def _samples(factors: MemoryFactors, phase: Phase | None) -> int:
    return factors.evaluation_size if phase == "evaluation" else factors.micro_size


def with_prediction(message: str, advised: str, config: Config, ranks: int, given: UserObjects) -> str:
    """Return the message of a run that ran out of memory in an update, with what a simulated update needs, and holds.

    Args:
        advised: The advice in the message; the smallest change with which the simulated run fits replaces it.
    """
    from lockstep.core.control_groups import tightest_limit
    from lockstep.distributed.memory import memory_if_started
    from lockstep.launch.devices import count_accelerators, count_cores
    from lockstep.plan.choosing import USABLE
    from lockstep.training.deciding import Explanation, NoAnswer, Question, ask

    device_type, devices = count_accelerators(config.launch)
    memory = memory_if_started(device_type, devices, count_cores(), ranks) if devices else None
    if memory is None:
        memory = tightest_limit().total // ranks
    try:
        usable = int(USABLE * memory)
        answer = ask(Question("explain", config, ranks, usable, given, on_cpu=not devices), _PREDICTION_SECONDS)
    except NoAnswer as reason:
        return message.replace(advised, f"{advised} The peak can't be predicted: {reason}.")
    assert isinstance(answer, Explanation), "an explanation was asked for"
    most, *others = (f"{category} ({size(held)})" for category, held in answer.largest)
    then = f", then {' and '.join(others)}" if others else ""
    predicted = f"{size(answer.peak)} were predicted, most of it {most}{then}"
    fits = f"{predicted}, which fits: something else holds memory. {advised}"
    return message.replace(advised, f"{predicted}: {answer.remedy}." if answer.remedy else fits)


def advice(
    factors: MemoryFactors, phase: Phase | None, requested: int | None = None, limit: MemoryLimit | None = None
) -> str:
    """Return what to change, the cheapest remedy first.

    Args:
        phase: where memory ran out; None: before the first update.
        requested: bytes of the allocation that failed, if known.
    """
    remedies = _REMEDIES.get(phase or "", _for_state)(factors)
    if limit is not None and limit.owner == SHARED_MEMORY:
        remedies = ["give /dev/shm more space (docker run --shm-size), or set data.loader.workers to 0", *remedies]
    if phase in _MICRO_SIZE_KEYS:
        micro_size = _samples(factors, phase)
        smaller = 0 if _is_smallest(factors, phase) else micro_size // 2
        if requested and limit is not None:
            if requested // micro_size > limit.total:  # nothing else makes one sample smaller
                need = size(requested // micro_size)
                return f"{_TOO_LARGE} {need}: make the samples or the model smaller."
            smaller = min(smaller, micro_size * limit.total // requested)  # the allocation grows with the samples
            smaller = smaller if phase == "evaluation" or smaller >= factors.least_size else 0
        key = _MICRO_SIZE_KEYS[phase]
        remedies = [*([f"set {key} to {smaller} (it is {micro_size})"] if smaller else []), *remedies]
    first, *others = remedies
    more = f" If that is not enough: {'; or '.join(others)}." if others else ""
    return f"{first[0].upper()}{first[1:]}.{more}"


def _for_activations(factors: MemoryFactors) -> list[str]:
    checkpointing = ["set memory.activation_checkpointing.mode to full"] if factors.can_checkpoint else []
    return [*checkpointing, *_for_state(factors)]


def _for_data(factors: MemoryFactors) -> list[str]:
    workers = factors.workers
    left_out = ["leave a sample out that is too large alone: data.leave_out"] if factors.micro_size == 1 else []
    fewer = [f"set data.loader.workers below {workers}, or data.loader.prefetch to 1"] if workers else []
    return [*left_out, *fewer, "make the dataset hold less of itself in memory, for example by np.memmap"]


def _for_checkpoint(factors: MemoryFactors) -> list[str]:
    return ["give the host memory for one copy of each rank's share of the training state", _sharding(factors)]


def _for_state(factors: MemoryFactors) -> list[str]:
    return [_sharding(factors), "make the model smaller, or give each rank more memory"]


def _sharding(factors: MemoryFactors) -> str:
    if factors.strategy != AUTO and find_strategy(factors.strategy).divides:
        return f"start more than {factors.ranks} ranks: each then holds a smaller part of the training state"
    if factors.ranks > 1:
        return f"set parallel.strategy to fsdp: each of the {factors.ranks} ranks then holds a part of the state"
    return "set parallel.strategy to fsdp on more ranks, with memory of their own: each holds a part of the state"


_REMEDIES: Mapping[str, Callable[[MemoryFactors], list[str]]] = {
    "forward": _for_activations,
    "backward": _for_activations,
    "data": _for_data,
    "checkpoint": _for_checkpoint,
}
_MICRO_SIZE_KEYS = {
    "forward": "batch.micro_size",
    "backward": "batch.micro_size",
    "data": "batch.micro_size",
    "evaluation": "evaluation.micro_size",
}
