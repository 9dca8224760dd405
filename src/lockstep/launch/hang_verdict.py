"""Finds out from the stacks of all ranks of a host which of those that don't move is the cause."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import zip_longest

from lockstep.launch.flight_records import read_records, request_records
from lockstep.launch.hang_report import Hang, Sight, Wait, are_recorded, waits_of
from lockstep.launch.rank_stacks import (
    is_debugged,
    main_frames,
    process_state,
    stacks_from_outside,
    waits_in_collective,
    write_stacks,
)

_WORKERS_S = 3.0  # for the stacks of all data workers of all ranks


def suspected(sights: Sequence[Sight], early: float) -> list[Sight]:
    """Return the ranks that don't move and that all others wait for; all of them, if all wait for each other.

    One that is stopped while others aren't is known by that, also where their waits aren't seen, as at the start.

    Args:
        early: Seconds before its limit at which a rank is suspected.
    """
    overdue = [sight for sight in sights if sight.age > sight.limit - early]
    still = [sight for sight in overdue if not sight.waits]
    if others := [sight for sight in sights if not sight.waits and sight not in still]:
        others_run = all(sight.state != "T" for sight in others)
        return [sight for sight in still if sight.stopped > sight.limit - early and others_run]
    if still:
        return still
    return overdue if len(overdue) == len(sights) else []


def verdict(suspects: Sequence[Sight], sights: Sequence[Sight], *, alone: bool) -> Hang | None:
    """Return which rank hangs, by the stacks of all: none if all wait for other hosts. None: one is being debugged."""
    if any(sight.state == "t" for sight in sights):  # a debugger holds it
        return None
    moving = [sight for sight in sights if sight.state != "T"]
    beats = {sight.rank: sight.beat for sight in moving}
    requested = request_records(beats)
    stacks = write_stacks({sight.process: sight.beat for sight in moving})
    records = read_records(beats, requested)
    stacks.update(stacks_from_outside([sight.process for sight in sights if sight.state == "T"]))
    frames = {process: main_frames(text) for process, text in stacks.items()}
    if any(is_debugged(each) for each in frames.values()):
        return None
    stacks.update(_worker_stacks(sights))
    stopped = [sight for sight in suspects if sight.state == "T"]
    if stopped:
        return Hang(tuple(stopped), stacks, records, is_stopped=True)
    idle = [sight for sight in sights if not waits_in_collective(frames.get(sight.process, []), marked=sight.waits)]
    idle = [sight for sight in idle if sight in suspects] or idle
    waits = waits_of(sights, stacks, records)
    if not idle or (are_recorded(waits) and any(wait.pending and wait.pending.on_device for wait in waits)):
        odd = odd_one([wait for wait, sight in zip(waits, sights, strict=True) if sight in suspects])
        return Hang(tuple(sight for sight in sights if alone and sight.rank == odd.rank), stacks, records, waits=waits)
    behind = min((sight.updates, sight.calls) for sight in idle)
    culprits = [sight for sight in idle if (sight.updates, sight.calls) == behind]
    return Hang(tuple(culprits), stacks, records)


def _worker_stacks(sights: Sequence[Sight]) -> dict[int, str]:
    """Return the stacks of data workers that fetch, as far as they write them in time: first of those waited for.

    One worker of every rank at the same time: those of a rank share its file.
    """
    stacks: dict[int, str] = {}
    until = time.monotonic() + _WORKERS_S
    for workers in zip_longest(*(sorted(s.work.workers, key=lambda worker: worker != s.work.worker) for s in sights)):
        if time.monotonic() > until:
            break
        each_beat = {worker.process: s.beat for s, worker in zip(sights, workers, strict=True) if worker is not None}
        running = {process: beat for process, beat in each_beat.items() if process_state(process) not in ("", "T", "Z")}
        if running:
            stacks.update(write_stacks(running))
    return stacks


def odd_one(waits: Sequence[Wait]) -> Wait:
    """Return the rank to kill where all wait: that whose collective fewest are in, or that hasn't started it."""
    if are_recorded(waits):
        return _odd_of(waits, lambda wait: wait.pending.call if wait.pending else None)
    return _odd_of(waits, lambda wait: wait.operation)


def _odd_of(waits: Sequence[Wait], collective: Callable[[Wait], object]) -> Wait:
    collectives = [collective(wait) for wait in waits]

    def key(wait: Wait) -> tuple[int, bool, int, int]:
        is_started = wait.pending is not None and wait.pending.is_started
        return collectives.count(collective(wait)), is_started, wait.calls, -wait.rank

    return min(waits, key=key)
