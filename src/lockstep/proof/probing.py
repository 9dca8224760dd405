"""Forwards of the reference, made again after its last update: why a run may depend on how its samples are cut.

    8 samples, twice                        7.31  7.52      a forward depends on those before it
    8 samples, other seeds                  7.31  7.40      it draws numbers
    8 samples, and 4 + 4 of them            7.31  6.98      samples of a micro-batch are tied to one another

What is measured here is evidence; a reason that explains a difference without it is a guess.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

import torch

from lockstep.config.schema import Loader
from lockstep.data.loader import evaluation_batches
from lockstep.training.session import components_of
from lockstep.transforms.block_state import changes, state_of

if TYPE_CHECKING:
    from lockstep.core.records import Batch
    from lockstep.training.session import Session

_SAMPLES = 8
_APART = {None: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}  # of a loss; rounding alone is far less
_LISTED = 3


def measured(session: Session) -> list[str]:
    """Sentences, the strongest first. Changes the session's state: it trains no more."""
    try:
        return _measured(session)
    except Exception:  # a model that can't be called so tells nothing, and spoils no proof
        return []


@torch.no_grad()
def _measured(session: Session) -> list[str]:
    size = min(_SAMPLES, components_of(session).source.facts.samples) // 2 * 2
    if size < 2:
        return []
    model = components_of(session).sharding.state.model
    model.train()
    (whole,) = _batches(session, size, 1)
    apart = _APART[_precision(session)]
    before = state_of({"": model})
    first = _loss(session, whole, 1)
    changed = changes(before, state_of({"": model}))
    second = _loss(session, whole, 1)
    if _differ(first, second, apart):
        named = ", ".join(changed[:_LISTED]) + (" and others" if len(changed) > _LISTED else "")
        state = f"it changes {named}" if changed else "it keeps something that is no buffer and no attribute"
        return [
            f"a forward depends on those before it: {size} samples have a loss of {first:.6g}, and at once again "
            f"{second:.6g}; {state}, of which each rank has its own"
        ]
    drawn = _loss(session, whole, 2)
    if _differ(first, drawn, apart):
        return [
            f"a forward draws numbers that the proof could not turn off: {size} samples have a loss of {first:.6g}, "
            f"and with other draws {drawn:.6g}"
        ]
    halves = sum(_loss(session, half, 1) for half in _batches(session, size // 2, 2))
    if not _differ(first, halves, apart):
        return []
    return [
        f"samples of a micro-batch are tied to one another: {size} of them have a summed loss of {first:.6g}, and cut "
        f"in two {halves:.6g}; the loss depends on batch.micro_size and on the number of ranks (an objective of your "
        "own says so by decomposes = False)"
    ]


def _batches(session: Session, size: int, number: int) -> list[Batch]:
    components = components_of(session)
    found = evaluation_batches(components.source, size, 0, 1, Loader(), components.world.device)
    return list(islice(found, number))


def _loss(session: Session, batch: Batch, seed: int) -> float:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        outputs = components_of(session).engine.outputs(batch.inputs)
        return float(components_of(session).objective.loss_sum(outputs, batch))


def _differ(one: float, other: float, apart: float) -> bool:
    return not abs(one - other) <= apart * max(abs(one), abs(other))


def _precision(session: Session) -> torch.dtype | None:
    from lockstep.optim.precision import resolve_compute

    return resolve_compute(components_of(session).config.precision.compute, components_of(session).world.device)
