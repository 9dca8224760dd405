"""The message of an out-of-memory error: the requested and the free memory, where it ran out, and what to change.

    RuntimeError: ... you tried to allocate 6442450944 bytes ...
    --> out of memory in the backward pass of micro-batch 2 of 4, update 13: 6.0 GiB were requested, and 1.2 of 4.0 GiB
        were free (ulimit -v limit). Set batch.micro_size to 4 (it is 8). If that is not enough: set ...

The cheapest remedy comes first: a smaller micro-batch, then activation checkpointing, then more ranks.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from lockstep.core.control_groups import SHARED_MEMORY
from lockstep.core.errors import OutOfMemory
from lockstep.core.formatting import size
from lockstep.core.out_of_memory import error_location, lacks_shared_memory, out_of_memory_cause, requested_bytes
from lockstep.loop.session import components_of
from lockstep.models.blocks import repeated_blocks
from lockstep.models.building_objectives import least_samples
from lockstep.plan.batch import half, smallest_micro_batch
from lockstep.strategies.registry import AUTO, find_strategy

if TYPE_CHECKING:
    import torch

    from lockstep.config.schema import Config
    from lockstep.core.control_groups import MemoryLimit
    from lockstep.core.out_of_memory import Phase
    from lockstep.loop.components import Components
    from lockstep.loop.session import Session

_TOO_LARGE = "One sample alone would need"


def least_micro_size(components: Components) -> int:
    """Return the smallest `batch.micro_size` that gives no micro-batch too few samples for the model."""
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
    """Return the factors of a rank's memory; without a session, from the config only."""
    factors = memory_factors(config, ranks)
    if session is None:
        return factors
    components = components_of(session)
    return replace(
        factors,
        micro_size=components.plan.batch.micro_size,
        least_size=least_micro_size(components),
        evaluation_size=components.evaluation.micro_size,
        strategy=components.plan.strategy,
        can_checkpoint=factors.can_checkpoint and bool(repeated_blocks(components.sharding.state.model)),
    )


@dataclass(frozen=True, slots=True)
class MemoryFactors:
    """The settings that determine how much memory a rank needs.

    Attributes:
        micro_size, evaluation_size: samples per forward.
        strategy: as resolved, or `auto` where it isn't resolved yet.
        can_checkpoint: whether the model has repeated blocks that keep their activations.
        least_size: the smallest `batch.micro_size` that can train the model.
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
    smallest = "; smaller micro-batches are impossible" if _is_smallest(factors, phase) else ""
    message = f"out of memory{where}: {need}{free}; this rank's peak was {size(peak_memory(device))}{smallest}."
    advised = advice(factors, phase, requested, limit)
    too_large = {} if advised.startswith(_TOO_LARGE) else sizes_too_large(phase, factors)
    return OutOfMemory(message, advised, too_large)


def sizes_too_large(phase: Phase | None, factors: MemoryFactors) -> dict[str, int]:
    """Return the size of micro-batches, by its key, with which memory ran out and smaller ones may do; or nothing."""
    key = _SIZE_KEYS.get(phase or "")
    return {} if key is None or _is_smallest(factors, phase) else {key: _samples(factors, phase)}


def _is_smallest(factors: MemoryFactors, phase: Phase | None) -> bool:
    """Return whether micro-batches can't be halved: they have one sample, or half as many are too few for the model."""
    samples = _samples(factors, phase)
    return phase in _SIZE_KEYS and (samples == 1 or (phase != "evaluation" and half(samples) < factors.least_size))


def _samples(factors: MemoryFactors, phase: Phase | None) -> int:
    return factors.evaluation_size if phase == "evaluation" else factors.micro_size


def advice(
    factors: MemoryFactors, phase: Phase | None, requested: int | None = None, limit: MemoryLimit | None = None
) -> str:
    """Return what to change, the cheapest remedy first.

    Args:
        phase: where memory ran out; None: before the first update.
        requested: bytes of the allocation that failed, if known.
    """
    remedies = []
    if phase in _SIZE_KEYS and phase != "update":
        micro_size = _samples(factors, phase)
        smaller = 0 if _is_smallest(factors, phase) else micro_size // 2
        if requested and limit is not None:
            if requested // micro_size > limit.total:  # nothing else makes one sample smaller
                return f"{_TOO_LARGE} {size(requested // micro_size)}: make the samples or the model smaller."
            smaller = min(smaller, micro_size * limit.total // requested)  # the allocation grows with the samples
            smaller = smaller if phase == "evaluation" or smaller >= factors.least_size else 0
        if smaller:
            remedies.append(f"set {_SIZE_KEYS[phase]} to {smaller} (it is {micro_size})")
    if limit is not None and limit.owner == SHARED_MEMORY:
        remedies.append("give /dev/shm more space (docker run --shm-size), or set data.loader.workers to 0")
    if phase == "data":
        if factors.workers:
            remedies.append(f"set data.loader.workers below {factors.workers}, or data.loader.prefetch to 1")
        remedies.append("make the dataset hold less of itself in memory, or leave large samples out: data.leave_out")
    else:
        if phase == "checkpoint":
            remedies.append("give the host memory for one copy of each rank's share of the training state")
        if phase in ("forward", "backward") and factors.can_checkpoint:
            remedies.append("set memory.activation_checkpointing.mode to full")
        remedies += [_sharding(factors), "make the model smaller, or give each rank more memory"]
    first, *others = remedies
    more = f" If that is not enough: {'; or '.join(others)}." if others else ""
    return f"{first[0].upper()}{first[1:]}.{more}"


def _sharding(factors: MemoryFactors) -> str:
    if factors.strategy != AUTO and find_strategy(factors.strategy).divides:
        return f"start more than {factors.ranks} ranks: each then holds a smaller part of the training state"
    if factors.ranks > 1:
        return f"set parallel.strategy to fsdp: each of the {factors.ranks} ranks then holds a part of the state"
    return "set parallel.strategy to fsdp on more ranks, with memory of their own: each holds a part of the state"


_SIZE_KEYS = {
    **dict.fromkeys(("forward", "backward", "update", "data"), "batch.micro_size"),
    "evaluation": "evaluation.micro_size",
}
