"""The first updates of a run on the simulated device, as one of its ranks, and what its memory held at the peak."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, cast
from unittest.mock import patch

from torch import nn

from lockstep.core.process_settings import paused_collection
from lockstep.core.progress import Progress
from lockstep.loop.components import Purpose
from lockstep.loop.session import components_of
from lockstep.sharding.collective_order import NumberExchange
from lockstep.simulation import device
from lockstep.simulation.memory import MemoryLedger, Peak, module_of, resizes_seen
from lockstep.simulation.ranks import simulated_rank
from lockstep.simulation.trace import recorded
from lockstep.training.assemble import assemble

if TYPE_CHECKING:
    from lockstep.assembly.user_objects import UserObjects
    from lockstep.config.schema import Config
    from lockstep.loop.session import Session
    from lockstep.simulation.memory import Category
    from lockstep.simulation.trace import StepTrace

UPDATES = 2
"""The first makes the optimizer's state."""
_CHECKED = 5  # steps before and after 4 are watched for writes to parameters, those from 5 to 7 are not
Recorder = Callable[[nn.Module], AbstractContextManager[Callable[[], None]]]


def peak_of_rank(
    config: Config,
    ranks: int,
    rank: int,
    given: UserObjects,
    updates: int = UPDATES,
    device_type: str = device.NAME,
    trace: StepTrace | None = None,
) -> Peak:
    """Return the peak of a rank over the first updates of a run; `device_type` is the ranks', `cpu` or simulated.

    Args:
        trace: Receives the work of the last update.
    """
    with paused_collection(), simulated_rank(rank, ranks, device_type=device_type) as simulated:
        ledger, watchers = MemoryLedger(device_type), simulated.execution.watchers
        if device_type != "cpu":
            watchers.append(ledger.see)
        with resizes_seen(ledger), patch.object(NumberExchange, "exchange", _equal_numbers):
            copied = replace(given, model=copy.deepcopy(given.model)) if isinstance(given.model, nn.Module) else given
            recorder = None if trace is None else partial(recorded, trace, simulated.execution)
            session = assemble(config, simulated.world, copied, Purpose.RESUME)  # initial values are not drawn
            ledger.restart()  # a session is assembled with the help of shapes, which the device never holds
            if device_type == "cpu":
                watchers.append(ledger.see)  # later, because a dataset's tensors are the CPU's, too
            try:
                if trace is not None:  # checks of the first updates are not in each one
                    session.progress = Progress(steps=_CHECKED)
                run_updates(session, ledger, _CHECKED + updates if trace is not None else updates, recorder)
            finally:
                session.close()
        if trace is not None:
            trace.allocations = ledger.allocations()
        return ledger.peak()


def _equal_numbers(ranks: NumberExchange, number: int) -> list[int]:
    """Return what all ranks would send: of a thousand, each message would take longer to simulate than a block."""
    return [number] * len(ranks.ranks)


def run_updates(session: Session, ledger: MemoryLedger, updates: int, recorder: Recorder | None = None) -> None:
    """Run until N updates are done, and record what the session's tensors are.

    Args:
        recorder: Records the work of the last update.
    """
    model, state = components_of(session).sharding.state.model, components_of(session).sharding.state

    def own_state() -> None:
        tensors = state.live_state().tensors
        of_optimizer = {name: tensor for name, tensor in tensors.items() if not name.startswith("model.")}
        modules = (module_of(name.split(".", 2)[-1]) for name in of_optimizer)  # optimizer.ENTRY.PARAMETER
        ledger.own("optimizer", of_optimizer.values(), modules)
        shapes = [tuple(shard.shape) for shard in state.flat.values()]
        ledger.own_model(model, components_of(session).plan.mesh.tensor, shapes)
        for category, held in state.held().items():
            ledger.own(cast("Category", category), held)

    def own_gradients() -> None:
        gradients = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
        ledger.own("gradients", gradients.values(), map(module_of, gradients))

    ledger.vocabulary = _vocabulary(session)
    own_state()
    with ledger.modules_seen(model):
        for batch in session.batches():
            ledger.phase = "activations"
            is_recorded = recorder is not None and session.progress.steps == updates - 1
            with recorder(model) if recorder is not None and is_recorded else nullcontext(lambda: None) as end_backward:
                session.accumulate(batch)
                end_backward()
                own_gradients()
                ledger.phase = "optimizer"
                session.commit()
            ledger.phase = "other"
            own_state()
            if session.progress.steps == updates:
                break


def _vocabulary(session: Session) -> frozenset[int]:
    components = components_of(session)
    of_model = getattr(getattr(components.sharding.state.model, "config", None), "vocab_size", None)
    sizes = {size for size in (components.source.facts.vocabulary, of_model) if isinstance(size, int)}
    return frozenset(sizes | {-(-size // components.plan.mesh.tensor) for size in sizes})
