"""Draws the fault of a round: kind, rank, update and phase, where the kind has an effect."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lockstep.resilience.disk_faults import DISK_KINDS, FLIP, SAMPLE
from lockstep.resilience.faults import OOM, PHASES, Fault
from lockstep.resilience.number_faults import DIVERGE, NAN

_SAVES = 4  # checkpoints of a run
_AFTER_SAVE = 3  # updates until a small checkpoint exists
_PHASES_OF_KIND = {NAN: "forward", DIVERGE: "host", SAMPLE: "data"}
_PHASES_OF_MEMORY = ("forward", "backward")  # a step of the optimizer would leave an update that isn't recorded


def updates_between_saves(steps: int) -> int:
    """Return the updates between two saves of a run of `steps` updates."""
    return max(1, steps // _SAVES)


def first_flip(steps: int) -> int:
    """Return the first update with two checkpoints."""
    return 2 * updates_between_saves(steps) + _AFTER_SAVE


def balanced(draws: random.Random, kinds: Sequence[str]) -> Iterator[str]:
    """Yield kinds without end, each once before any comes again."""
    while True:
        yield from draws.sample(kinds, len(kinds))


def draw_fault(draws: random.Random, kind: str, ranks: int, steps: int, plan: Path) -> Fault:
    """Return the fault of a round, for the file `plan` beside the run's folder."""
    phases = PHASES if ranks > 1 else [phase for phase in PHASES if phase != "communication"]
    fault = Fault(kind, draws.randrange(ranks), draws.randint(2, steps), draws.choice(phases))
    if kind in _PHASES_OF_KIND:
        return replace(fault, phase=_PHASES_OF_KIND[kind])
    if kind in DISK_KINDS:
        return replace(fault, step=min(fault.step, max(2, steps - updates_between_saves(steps))))
    if kind == OOM:
        return replace(fault, phase=draws.choice(_PHASES_OF_MEMORY))
    if kind == FLIP:
        step = min(max(fault.step, first_flip(steps)), steps)
        return replace(fault, step=step, phase="forward", folder=str(plan.with_name("run") / "checkpoints"))
    return fault
