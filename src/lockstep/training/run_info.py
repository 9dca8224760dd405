"""The facts about a run that its start prints."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from lockstep.core.ranks import started_by_lockstep
from lockstep.core.records import RunInfo
from lockstep.optim.precision import products_in, resolve_compute
from lockstep.plan.plan import because, strategy_of
from lockstep.strategies.registry import find_strategy
from lockstep.training.components import Components
from lockstep.training.session import Session, components_of

_INVARIANT = (
    "run.determinism invariant: each rank computes with one thread on the CPU; training is bitwise identical on any "
    "number of ranks, evaluations may differ in their last digits"
)
_NO_RESTARTS = "recovery.restarts has no effect here: only Lockstep's own launcher starts ranks again"


def run_info(
    session: Session, recipe: str, folder: str, resumed_from: int | None = None, notes: Sequence[str] = ()
) -> RunInfo:
    """Return the facts about the run of a session."""
    from lockstep.monitor.meters import peak_flops

    components = components_of(session)
    plan, world = components.plan, components.world
    dtype = resolve_compute(components.config.precision.compute, world.device)
    precision = {None: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    device_name = _device_name(world.device)
    return RunInfo(
        recipe=recipe,
        folder=folder,
        strategy=plan.strategy if plan.mesh.shares == plan.mesh.ranks else strategy_of(plan),
        backend=world.backend,
        precision=precision,
        device=device_name,
        ranks=world.size,
        steps=plan.steps,
        global_size=plan.batch.global_size,
        micro_size=plan.batch.micro_size,
        accumulation=plan.batch.accumulation,
        parameters=plan.parameters,
        trainable=plan.trainable,
        epoch_samples=plan.epoch_samples,
        peak_flops=peak_flops(device_name, products_in(dtype, world.device)),
        flops_per_token=components.flops_per_token,
        resumed_from=resumed_from,
        shares=components.position.shares,
        notes=(*plan.warnings, *_notes(components), *notes),
    )


def _notes(components: Components) -> tuple[str, ...]:
    strategy = find_strategy(components.plan.strategy)
    options = strategy.options_of(components.config.parallel)
    notes = []
    if strategy.divides and (reason := because(components.plan)):
        notes.append(reason)
    coupled = components.coupled
    if coupled is not None or not components.objective.decomposes:
        reason = coupled or "the objective does not decompose over samples"
        notes.append(f"{reason}: this run depends on batch.micro_size and on the number of ranks")
    if components.plan.batch.fixed:
        notes.append(_INVARIANT)
    recovery = components.config.recovery
    if recovery.model_fields_set and recovery.ever and not started_by_lockstep(os.environ):
        notes.append(_NO_RESTARTS)
    if strategy.unwrapped and components.sharding.step.module is components.sharding.state.model:
        notes.append(strategy.unwrapped)
    if (loss := strategy.lossy(options)) is not None:
        notes.append(f"{loss}: the curve is close to the single process's, not equal")
    return (*notes, *strategy.remarks(options))


def _device_name(device: torch.device) -> str:
    return "cpu" if device.type == "cpu" else str(torch.get_device_module(device).get_device_name(device))
