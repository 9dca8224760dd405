"""The last launch of a run, as its launchers recorded it. No torch is needed.

run.lock            the last attempt --.
logs/ends*.jsonl    a line each attempt -- its line: how each rank ended; none: its launcher was killed
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.core.formatting import first_sentence, size
from lockstep.core.ranks import LAUNCHER
from lockstep.launch.ends_file import LaunchEnds, read_ends
from lockstep.monitor.attempts import ENDS
from lockstep.monitor.folder import LOGS, held_by, is_finished, lock_holder

_FULL = 1 << 20  # bytes that are free on a disk that counts as full


@dataclass(frozen=True, slots=True)
class LastLaunch:
    """The last launch of a run.

    Attributes:
        records: Its lines, of all hosts, node 0's first; none if none was left.
        was_killed: Whether its launcher, which was Lockstep's, left no line.
        log_starts: Rank --> where its log of this launch begins, in bytes of the file.
    """

    records: tuple[LaunchEnds, ...]
    was_killed: bool
    log_starts: Mapping[int, int]


def last_launch(run: Path, environment: Mapping[str, Any]) -> LastLaunch:
    """Return what is known of the run's last launch."""
    attempt = (lock_holder(run) or b"").decode(errors="replace").strip()
    entries = read_ends(run / LOGS)
    records = tuple(entry for entry in entries if entry.attempt == attempt)
    if records:
        newest = {entry.file: entry for entry in records}
        starts = {rank: start for entry in newest.values() for rank, (start, _) in entry.logs.items()}
        return LastLaunch(tuple(newest.values()), False, starts)
    starts = {rank: end for entry in entries for rank, (_, end) in entry.logs.items()}
    variables = environment.get("variables")
    was_own = LAUNCHER in variables if isinstance(variables, Mapping) else bool(entries)
    return LastLaunch((), was_own, starts)


def _entries(run: Path) -> list[LaunchEnds]:
    """Return the lines of node 0's launcher, which decides for all."""
    return [entry for entry in read_ends(run / LOGS) if entry.file == f"{LOGS}/{ENDS}"]


def decided_ends(run: Path) -> list[LaunchEnds]:
    """Return how each start of a run's ranks ended, the first one first, without those that were refused."""
    return [entry for entry in _entries(run) if not entry.is_refused]


def survived_failures(run: Path, most: int) -> str:
    """Return a sentence about the failures after which ranks were started again, the newest last; empty: none."""
    entries = _entries(run)
    if not (is_finished(run) or held_by(run) is not None):
        while entries and entries[-1].is_refused:
            entries.pop()
        entries = entries[:-1]
    failures = [entry for entry in entries if _is_failure(entry)]
    if not failures:
        return ""
    shown = [
        f"{first_sentence(entry.text)}{f' (after step {entry.step:,})' if entry.step is not None else ''}"
        for entry in failures[-most:]
    ]
    number = "one failure" if len(failures) == 1 else f"{len(failures)} failures"
    newest = ", the newest of which are" if len(failures) > most else ""
    return f"It survived {number}{newest}: {'; then '.join(shown)}."


def failure_before_refusals(run: Path) -> LaunchEnds | None:
    """Return the failure after which all starts were refused; None: there is none."""
    entries = _entries(run)
    newest = next((entry for entry in reversed(entries) if not entry.is_refused), None)
    return newest if newest is not None and newest is not entries[-1] and _is_failure(newest) else None


def _is_failure(entry: LaunchEnds) -> bool:
    return entry.kind.is_failure and not entry.is_refused


def full_disk(run: Path) -> str:
    """Return what shows that the disk of a run has no space now; empty: it has some."""
    with suppress(OSError):
        disk = os.statvfs(run)
        free = disk.f_bavail * disk.f_frsize
        if free < _FULL:
            return f"this disk has {size(free)} free now"
        if disk.f_files and not disk.f_favail:
            return "this disk has no inodes free now"
    return ""


def why_unrecorded(run: Path) -> str:
    """Return why the last launch of a run left no record, as far as its folder shows."""
    if full := full_disk(run):
        return f"its disk is full ({full})"
    return "it was killed, its machine stopped, or its disk was full"
