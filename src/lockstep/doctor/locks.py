"""Checks of the locks of run folders: is the process that holds one still there?"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from lockstep.doctor.findings import Finding, MachineView, not_here, ok, warning, wrong
from lockstep.monitor.folder import is_run
from lockstep.monitor.run_lock import HOLDER, LOCK, held_by

_MOST_RUNS = 500


def run_locks(machine: MachineView) -> Iterator[Finding]:
    """Look for locks of runs whose process has ended, but which are held: their runs can't be resumed."""
    folder = machine.folder
    if not folder.is_dir():
        yield not_here(f"there is no folder {folder}")
        return
    runs = (
        [folder] if is_run(folder) else [run for run in itertools.islice(folder.iterdir(), _MOST_RUNS) if is_run(run)]
    )
    held = [(run, holder) for run in runs if (holder := held_by(run)) is not None]
    stale = [finding for run, holder in held for finding in _stale(machine, run, holder)]
    yield from stale
    if not stale:
        yield ok(f"{len(runs)} run{'s' * (len(runs) != 1)} in {folder}, {len(held)} of them running")


def _stale(machine: MachineView, run: Path, holder: str) -> Iterator[Finding]:
    match = HOLDER.fullmatch(holder)
    if match is None:
        return
    process, host, since = match.groups()
    if host != machine.hostname:
        yield warning(
            f"{run} is locked by process {process} on {host}, since {since}",
            f"If {host} has ended, the file server frees the lock; until then copy the run, and train the copy.",
        )
    elif not (machine.root / "proc" / process).exists():
        keepers = list(_keepers(machine, run / LOCK))
        seen = f"{run} is locked since {since} by process {process}, which has ended"
        if keepers:
            listed = " ".join(keepers)
            yield wrong(f"{seen}; what it started has not: {', '.join(keepers)}", f"End that: kill {listed}")
        else:
            yield wrong(seen, f"Find who has it open (fuser -v {run / LOCK}), and end that process.")


def _keepers(machine: MachineView, lock: Path) -> Iterator[str]:
    """Yield the processes that have a file open, as far as this user may see them."""
    target = os.path.realpath(lock)
    for process in filter(str.isdecimal, machine.names("proc")):
        for descriptor in machine.names(f"proc/{process}/fd"):
            try:
                link = os.readlink(Path(machine.root, "proc", process, "fd", descriptor))
            except OSError:
                continue
            if link == target:
                yield process
                break
