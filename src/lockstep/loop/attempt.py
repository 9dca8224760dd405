"""Records the beginning of an attempt in attempts.jsonl: when, its hosts, and what its plan promised."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch

from lockstep.core.ranks import started_by_lockstep
from lockstep.core.records import RunInfo
from lockstep.launch.memory_folder import note_attempt
from lockstep.loop.out_of_memory import least_micro_size
from lockstep.loop.session import Session, components_of
from lockstep.monitor.attempts import (
    Attempt,
    Planned,
    attempt_id,
    attempts_text,
    by_host,
    facts_of,
    launched,
)
from lockstep.monitor.folder import ATTEMPTS, RunFolder
from lockstep.optim.precision import products_in, resolve_compute
from lockstep.plan.plan import because, strategy_of
from lockstep.strategies.registry import find_strategy

if TYPE_CHECKING:
    from lockstep.loop.components import Components

_INVARIANT = "run.determinism invariant: training is bitwise identical on any number of ranks, each with one CPU thread"
_NO_RESTARTS = "recovery.restarts has no effect here: only Lockstep's own launcher starts ranks again"
_SAME_LAUNCH_S = 0.1  # times are recorded rounded


def run_info(
    session: Session, recipe: str, folder: str, resumed_from: int | None = None, notes: Sequence[str] = ()
) -> RunInfo:
    """Return the facts about the run of a session."""
    from lockstep.monitor.meters import peak_flops

    components = components_of(session)
    plan, world = components.plan, components.world
    dtype = resolve_compute(components.config.precision.compute, world.device)
    precision = {None: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    named = world.device.type != "cpu"
    device_name = str(torch.get_device_module(world.device).get_device_name(world.device)) if named else "cpu"
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
    plan, has_choice = components.plan, components.config.batch.micro_size == "auto"
    if (strategy.divides or (has_choice and plan.batch.accumulation > 1)) and (reason := because(plan)):
        notes.append(reason)
    if components.coupled is not None or not components.objective.decomposes:
        reason = components.coupled or "the objective does not decompose over samples"
        notes.append(f"{reason}: this run depends on batch.micro_size and on the number of ranks")
    if components.plan.batch.fixed:
        notes.append(_INVARIANT)
    recovery = components.config.recovery
    if recovery.model_fields_set and recovery.ever and not started_by_lockstep(os.environ):
        notes.append(_NO_RESTARTS)
    if strategy.unwrapped and components.sharding.step.module is components.sharding.state.model:
        notes.append(strategy.unwrapped)
    if (loss := strategy.exactness.lossy(options)) is not None:
        notes.append(f"{loss}: the curve is close to the single process's, not equal")
    return (*notes, *strategy.remarks(options))


def record_attempt(
    session: Session, run: Path, earlier: Sequence[Attempt], ended: float, info: RunInfo, memory: Path | None = None
) -> str | None:
    """Record this attempt, and return its id, on the first rank; all ranks call it.

    Args:
        earlier: The attempts of the run before this one.
        ended: When the last of them gave its last sign; NaN: unknown.
        memory: The launcher's folder in memory; None: there is none.
    """
    components = components_of(session)
    hosts = cast("list[str]", components.world.axis.gather(socket.gethostname()))
    if components.world.rank != 0:
        return None
    plan, held = components.plan, components.plan.placement
    sizes = {"least_micro_size": least_micro_size(components), "evaluation_size": components.evaluation.micro_size}
    start = launched(run)
    is_again = any(abs(attempt.launched - start) < _SAME_LAUNCH_S for attempt in earlier)
    attempt = Attempt(
        ended if is_again else start,  # one after another in the same launch: when that had ended
        time.time(),
        ended,
        session.progress.steps,
        session.seconds,
        by_host(hosts),
        {**facts_of(info), **sizes},  # the launcher looks at them when memory has run out
        Planned(held.parameters, held.gradients, held.optimizer, plan.bubble),
    )
    RunFolder.open(run).write(ATTEMPTS, attempts_text((*earlier, attempt)))
    if memory is not None:
        note_attempt(memory, run)
    return attempt_id(len(earlier) + 1, attempt)
