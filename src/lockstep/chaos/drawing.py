"""Draws the faults of a round: kind, rank, update and phase, where the kind can show what it costs.

kill, exit, raise, ...          any update but the first, any phase
sample                          samples of any update but the first
nan                             the first forward of any update but the first
diverge                         after the optimizer's step of any update but the first
full, readonly, gone, slow      an update that a save follows
flip                            after the second save
oom                             a forward or backward: a rank that fails in its optimizer's step leaves an update that
                                another rank has finished and not recorded
shrink                          a rank of a host other than node 0, which must stay
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from lockstep.resilience.disk_faults import DISK_KINDS, FLIP, SAMPLE
from lockstep.resilience.faults import NETWORK_KINDS, OOM, PHASES, SHRINK, Fault
from lockstep.resilience.number_faults import DIVERGE, NAN

_SAVES = 4  # checkpoints of a run
_AFTER_SAVE = 3  # updates until a small checkpoint exists
_PHASES_OF_KIND = {NAN: "forward", DIVERGE: "host", SAMPLE: "data"}
_PHASES_OF_MEMORY = ("forward", "backward")


def updates_between_saves(steps: int) -> int:
    """Return the updates between two saves of a run of `steps` updates."""
    return max(1, steps // _SAVES)


def first_flip(steps: int) -> int:
    """Return the first update in which two checkpoints exist."""
    return 2 * updates_between_saves(steps) + _AFTER_SAVE


def balanced(draws: random.Random, kinds: Sequence[str]) -> Iterator[str]:
    """Yield kinds without end, each once before any comes again."""
    while True:
        yield from draws.sample(kinds, len(kinds))


def draw_fault(draws: random.Random, kind: str, ranks: int, per_host: int, steps: int, plan: Path) -> Fault:
    """Return the fault of a round.

    Args:
        per_host: Ranks of each host.
        plan: The file that they are written to; the run's folder is beside it.
    """
    phases = PHASES if ranks > 1 else [phase for phase in PHASES if phase != "communication"]
    first = per_host if kind == SHRINK else 0
    fault = Fault(kind, draws.randrange(first, ranks), draws.randint(2, steps), draws.choice(phases))
    if kind in _PHASES_OF_KIND:
        return replace(fault, phase=_PHASES_OF_KIND[kind])
    if kind in DISK_KINDS:
        return replace(fault, step=min(fault.step, max(2, steps - updates_between_saves(steps))))
    if kind in NETWORK_KINDS:
        return replace(fault, folder=str(plan.with_suffix(".planted")))
    if kind == OOM:
        return replace(fault, phase=draws.choice(_PHASES_OF_MEMORY))
    if kind == FLIP:
        step = min(max(fault.step, first_flip(steps)), steps)
        return replace(fault, step=step, phase="forward", folder=str(plan.with_name("run") / "checkpoints"))
    return fault
