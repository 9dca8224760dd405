"""Peaks of two models, counted by the ledger and by torch's allocator."""

from __future__ import annotations

from typing import Any

from kit import small
from kit.peak import held_by, peak_of
from torch.utils._pytree import tree_leaves

from lockstep.assembly.user_objects import UserObjects
from lockstep.config.loading import validate
from lockstep.loop.session import components_of
from lockstep.simulation.memory import MemoryLedger, Peak, Watched, resizes_seen
from lockstep.simulation.updates import run_updates
from lockstep.training.job import opened

_UPDATES = 3
_DECODER: dict[str, Any] = {
    "model": {"kind": "transformer", "vocabulary": 256, "layers": 2, "heads": 2, "width": 64},
    "data": {"train": {"kind": "stdlib-text", "length": 64}},
    "objective": {"kind": "next-token"},
    "batch": {"global_size": 8, "micro_size": 4},
}


def of_two_models(strategy: str) -> list[tuple[Peak, int]]:
    """Return each model's peak, and what torch's allocator has counted over another update."""
    sections = {"parallel": {"strategy": strategy}, "run": {"steps": _UPDATES + 1}}
    return [
        _measured({**small.config(), **sections, "batch": {"global_size": 20}}),
        _measured({**small.config(), **_DECODER, **sections}),
    ]


def of_two_models_on_two(strategy: str) -> list[tuple[Peak, int]]:
    with small.in_group():
        return of_two_models(strategy)


def _measured(config: dict[str, Any]) -> tuple[Peak, int]:
    ledger = MemoryLedger("cpu")
    with opened(validate(config).config, UserObjects()) as session:
        with Watched(ledger), resizes_seen(ledger):
            run_updates(session, ledger, _UPDATES)
        batch = next(session.batches())

        def update() -> None:
            session.accumulate(batch)
            session.commit().result()

        device = components_of(session).world.device
        tensors = tree_leaves([(part.inputs, part.targets) for part in batch.micro_batches])
        held = held_by([*session.state().tensors.values(), *tensors], device)
        return ledger.peak(), held + peak_of(update, device)
