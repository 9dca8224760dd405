"""Finds features that make a run depend on ranks and micro-batches by design, and turns them off if possible.

Dropout is set to 0; batch norm and random data are noted. After its last step the reference repeats forwards, which
shows the same of other code:

    8 samples, twice                        7.31  7.52      a forward depends on earlier ones
    8 samples, other seeds                  7.31  7.40      it draws random numbers
    8 samples, and 4 + 4 of them            7.31  6.98      it couples the samples of a micro-batch
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from lockstep.config.schema import Loader
from lockstep.core.formatting import listed
from lockstep.data.fetching import FetchRequest, fetch
from lockstep.data.loader import evaluation_batches
from lockstep.loop.session import components_of
from lockstep.optim.precision import resolve_compute
from lockstep.strategies.registry import find_strategy

if TYPE_CHECKING:
    from torch import nn

    from lockstep.core.protocols import Source
    from lockstep.core.records import Batch
    from lockstep.loop.session import Session

_DROPOUT_WORDS = ("drop", "jitter")
_MAX_DROPOUTS = 4
_FETCHED = 4
_FORWARDED = 8
_TOLERANCE = {None: 1e-5, torch.bfloat16: 2e-2, torch.float16: 5e-3}  # of a loss; rounding is far less


# --- by inspection ------------------------------------------------------------------------------------------------


def disable_dropout(model: nn.Module) -> list[str]:
    """Set all dropout probabilities to 0, in place; return a note that lists them, if there are any."""
    disabled: dict[str, float] = {}
    configs: set[int] = set()
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        _set_to_zero(module, prefix, disabled, is_dropout="dropout" in type(module).__name__.lower())
        config = getattr(module, "config", None)
        if getattr(config, "__dict__", None) and id(config) not in configs:
            configs.add(id(config))
            _set_to_zero(config, f"{prefix}config.", disabled)
    if not disabled:
        return []
    names = listed([f"{name} {value:g}" for name, value in disabled.items()], _MAX_DROPOUTS)
    return [f"dropout is set to 0 ({names}), because it is random per rank and micro-batch"]


def _set_to_zero(holder: Any, prefix: str, disabled: dict[str, float], *, is_dropout: bool = False) -> None:
    for name, value in list(vars(holder).items()):
        named = any(word in name.lower() for word in _DROPOUT_WORDS) or (is_dropout and name == "p")
        if named and isinstance(value, float) and value > 0:
            setattr(holder, name, 0.0)
            disabled[prefix + name] = value


def design_notes(session: Session) -> list[str]:
    """Return why this run may depend on the micro-batch size and the number of ranks."""
    components = components_of(session)
    notes = []
    if components.coupled is not None or not components.objective.decomposes:
        reason = components.coupled or "the objective does not decompose over samples (decomposes = False)"
        notes.append(f"{reason}: the loss depends on batch.micro_size and on the number of ranks")
    if components.source.draws and _draws(components.source):
        notes.append("the data are random per rank and micro-batch, so samples differ between numbers of ranks")
    strategy = find_strategy(components.plan.strategy)
    if (loss := strategy.exactness.lossy(strategy.options_of(components.config.parallel))) is not None:
        notes.append(loss)
    return notes


def _draws(source: Source) -> bool:
    indices = np.arange(min(_FETCHED, source.facts.samples))
    fetched = (fetch(source, FetchRequest(indices, False, 0, seed)) for seed in (1, 2))
    first, second = (tree_leaves((samples.inputs, samples.targets)) for samples in fetched)
    return len(first) != len(second) or not all(map(_equal, first, second))


def _equal(first: object, second: object) -> bool:
    if isinstance(first, torch.Tensor) and isinstance(second, torch.Tensor):
        return torch.equal(first, second)
    return bool(first == second)


# --- by measurement -----------------------------------------------------------------------------------------------


def measured_causes(session: Session) -> list[str]:
    """Return what repeated forwards show. They change the session's state: it can't train afterwards."""
    try:
        return _measured_causes(session)
    except Exception:  # a model that can't be called like this shows nothing, and must not fail the verification
        return []


@torch.no_grad()
def _measured_causes(session: Session) -> list[str]:
    components = components_of(session)
    size = min(_FORWARDED, components.source.facts.samples) // 2 * 2
    if size < 2:
        return []
    (whole,) = _batches(session, size, 1)
    tolerance = _TOLERANCE[resolve_compute(components.config.precision.compute, components.world.device)]
    first = _loss(session, whole, seed=1)
    second = _loss(session, whole, seed=1)
    if _differ(first, second, tolerance):
        return [
            f"a forward depends on earlier ones: the loss of {size} samples is {first:.6g}, and {second:.6g} when "
            "repeated; each rank has this state for itself"
        ]
    reseeded = _loss(session, whole, seed=2)
    if _differ(first, reseeded, tolerance):
        return [
            f"a forward draws random numbers that verify can't turn off: the loss of {size} samples is {first:.6g}, "
            f"and {reseeded:.6g} with another seed"
        ]
    halves = sum(_loss(session, half, seed=1) for half in _batches(session, size // 2, 2))
    if not _differ(first, halves, tolerance):
        return []
    return [
        f"the model or objective couples the samples of a micro-batch: the summed loss of {size} samples is "
        f"{first:.6g}, and {halves:.6g} in two halves; the loss depends on batch.micro_size and on the number of ranks "
        "(a custom objective declares it by decomposes = False)"
    ]


def _batches(session: Session, size: int, number: int) -> list[Batch]:
    components = components_of(session)
    return list(islice(evaluation_batches(components.source, size, 0, 1, Loader(), components.world.device), number))


def _loss(session: Session, batch: Batch, *, seed: int) -> float:
    components = components_of(session)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if components.config.objective.second_model is not None:  # its outputs belong to the batch
            return float(components.engine.evaluate([batch])["loss_sum"])
        return float(components.objective.loss_sum(components.engine.outputs(batch.inputs), batch))


def _differ(first: float, second: float, tolerance: float) -> bool:
    return not abs(first - second) <= tolerance * max(abs(first), abs(second))
