"""Finds out from the stacks of all ranks of a host which of those that don't move is the cause."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.launch.hang_report import Hang, Sight, Wait, waits_of
from lockstep.launch.rank_stacks import (
    is_debugged,
    main_frames,
    stack_from_outside,
    waits_in_collective,
    write_stacks,
)


def verdict(suspects: Sequence[Sight], sights: Sequence[Sight], *, alone: bool) -> Hang | None:
    """Return which rank hangs, by the stacks of all: none if all wait for other hosts. None: one is being debugged."""
    if any(sight.state == "t" for sight in sights):  # a debugger holds it
        return None
    stacks = write_stacks({sight.process: sight.beat for sight in sights if sight.state != "T"})
    stacks.update({sight.process: stack_from_outside(sight.process) for sight in sights if sight.state == "T"})
    frames = {process: main_frames(text) for process, text in stacks.items()}
    if any(is_debugged(each) for each in frames.values()):
        return None
    stopped = [sight for sight in suspects if sight.state == "T"]
    if stopped:
        return Hang(tuple(stopped), stacks, is_stopped=True)
    idle = [sight for sight in sights if not waits_in_collective(frames.get(sight.process, []), marked=sight.waits)]
    idle = [sight for sight in idle if sight in suspects] or idle
    if not idle:
        waits = waits_of(sights, stacks)
        odd = odd_one([wait for wait, sight in zip(waits, sights, strict=True) if sight in suspects])
        return Hang(tuple(sight for sight in sights if alone and sight.rank == odd.rank), stacks, waits=waits)
    behind = min((sight.updates, sight.calls) for sight in idle)
    culprits = [sight for sight in idle if (sight.updates, sight.calls) == behind]
    return Hang(tuple(culprits), stacks)


def odd_one(waits: Sequence[Wait]) -> Wait:
    """Return the rank to kill where all wait in collectives that don't match: that whose collective fewest are in."""
    operations = [wait.operation for wait in waits]
    return min(waits, key=lambda wait: (operations.count(wait.operation), wait.calls, -wait.rank))
