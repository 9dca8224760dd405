"""Draws the faults of a round: kind, rank, update and phase, where the kind can show what it costs.

kill, exit, raise, sample       any update but the first, any phase
badsample                       a sample of any update but the first
full, readonly, gone, slow      an update that a save follows
flip                            after the second save; the other ranks are killed then, too, and save nothing
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lockstep.resilience.disk_faults import DISK_KINDS, FLIP
from lockstep.resilience.faults import PHASES, Fault
from lockstep.resilience.number_faults import BAD_SAMPLE

_AFTER_SAVE = 3  # updates until a small checkpoint exists


def draw_faults(
    draws: random.Random, kinds: Sequence[str], ranks: int, steps: int, every: int, checkpoints: Path
) -> list[Fault]:
    """Return the faults of a round, the first of which is the one to report.

    Args:
        every: Updates between saves.
        checkpoints: Folder of the round's checkpoints.
    """
    phases = PHASES if ranks > 1 else [phase for phase in PHASES if phase != "communication"]
    fault = Fault(draws.choice(kinds), draws.randrange(ranks), draws.randint(2, steps), draws.choice(phases))
    if fault.kind == BAD_SAMPLE:
        return [replace(fault, phase="forward")]
    if fault.kind in DISK_KINDS:
        return [replace(fault, step=min(fault.step, max(2, steps - every)))]
    if fault.kind == FLIP:
        step = min(max(fault.step, 2 * every + _AFTER_SAVE), steps)
        flip = replace(fault, step=step, phase="forward", folder=str(checkpoints))
        return [flip, *(replace(flip, kind="kill", rank=rank) for rank in range(ranks) if rank != fault.rank)]
    return [fault]
