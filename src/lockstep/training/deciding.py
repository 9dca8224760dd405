"""The facts about this run's machines, and what `auto` takes on them: the first rank asks, all ranks get its answer."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch
from torch import nn

from lockstep.config.schema import Loader
from lockstep.data.loader import evaluation_batches
from lockstep.distributed.memory import rank_memory
from lockstep.models.build import describe_model, parameter_facts
from lockstep.plan.choosing import is_plenty
from lockstep.plan.plan import Machine
from lockstep.strategies.registry import AUTO
from lockstep.training.components import Purpose
from lockstep.training.predictions import NoAnswer, Question, ask

if TYPE_CHECKING:
    from lockstep.config.schema import Config
    from lockstep.core.protocols import Source
    from lockstep.distributed.process_group import World
    from lockstep.plan.choosing import Decision
    from lockstep.training.user_objects import UserObjects

_TOKEN_BYTES = 16  # of its ids and targets


def decides(config: Config, ranks: int) -> bool:
    """Return whether `auto` has a choice that depends on memory."""
    chooses = config.parallel.strategy == AUTO and ranks > 1
    splits = config.batch.micro_size == "auto" and config.batch.global_size > ranks
    is_whole = config.parallel.pipeline == 1  # a pipeline's micro-batches keep its stages busy
    return (chooses or splits) and is_whole and config.run.determinism != "invariant"


def machine_of(config: Config, world: World, given: UserObjects, source: Source, purpose: Purpose) -> Machine:
    """Return the facts about the machines of a run, the same on all ranks; a collective."""
    machine_ranks = _machine_ranks(world)
    has_choice = decides(config, world.size)
    if not has_choice and config.parallel.strategy != AUTO:
        return Machine(machine_ranks, None, world.device.type)
    memory = rank_memory(world.device, world.axis, world.machine_ranks)
    machine = Machine(machine_ranks, memory, world.device.type)
    if purpose is Purpose.EVALUATE or not has_choice:
        return machine
    answer = _decision(config, world, given, source, memory) if world.rank == 0 else None
    world.axis.barrier()
    decision, note = cast("tuple[Decision | None, str]", world.axis.gather(answer or (None, ""))[0])
    return replace(machine, decision=decision, undecided=note)


def _machine_ranks(world: World) -> int:
    """Return the ranks of a machine; where machines have different numbers, the largest that divides all of them."""
    if world.machine_ranks == world.size:
        return world.size
    return math.gcd(*cast("list[int]", world.axis.gather(world.machine_ranks)))


def _decision(
    config: Config, world: World, given: UserObjects, source: Source, memory: int
) -> tuple[Decision | None, str]:
    """Return the decision; or None, and why there is none, which is empty if none is needed."""
    try:
        if isinstance(given.model, nn.Module):
            facts = parameter_facts(given.model)
        else:
            facts = describe_model(config.model, source.facts, trust_remote_code=given.trust_remote_code)
        if is_plenty(config, world.size, facts, _sample_bytes(source), memory):
            return None, ""
    except Exception:  # what is wrong with the model or the data is reported where they are used, on all ranks
        return None, ""
    try:
        return ask(Question("decide", config, world.size, memory, given, on_cpu=world.device.type == "cpu")), ""
    except NoAnswer as reason:
        return None, str(reason)


def _sample_bytes(source: Source) -> int:
    if source.facts.tokens_per_sample is not None:
        return source.facts.tokens_per_sample * _TOKEN_BYTES
    inputs = next(evaluation_batches(source, 1, 0, 1, Loader(), torch.device("cpu"))).inputs
    values = inputs if isinstance(inputs, tuple) else inputs.values()
    return sum(value.nbytes for value in values if isinstance(value, torch.Tensor))
