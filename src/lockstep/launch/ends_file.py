"""The record of how the ranks of each launch have ended, beside their logs.

    logs/ends.jsonl      written by node 0's launcher, or the only one: a line each launch
    logs/ends-1.jsonl    by node 1's: the ranks of its host, and what it knows of the others

    {"attempt": "process 7 on a, since ...", "time": ..., "kind": "killed", "code": 1, "text": "rank 1 on host b was
     killed by SIGKILL", "step": 120, "cause": 1,
     "ranks": [{"rank": 1, "host": "b", "kind": "killed", "text": ..., "time": ...}],
     "logs": {"1": [0, 5120]}, "environment": {"host": "b", "packages": {...}, "variables": {...}}}

`attempt` is the text of the run's lock, the same on all hosts. A launcher that is killed leaves no line.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.core.failure_kinds import FailureKind
from lockstep.core.files import MAX_JSON_BYTES, append_line, read_bounded
from lockstep.core.formatting import counted, first_sentence, size
from lockstep.core.ranks import LAUNCHER
from lockstep.core.secrets import shareable
from lockstep.launch import streams
from lockstep.launch.ends import End, first_cause
from lockstep.launch.outcome import LaunchResult, gist
from lockstep.monitor.attempts import ENDS
from lockstep.monitor.environment import short_description
from lockstep.monitor.folder import LOGS, held_by, is_finished, lock_holder
from lockstep.monitor.goodput import step_reached
from lockstep.monitor.jsonl import as_number, last_record

_MOST_HOSTS = 1024
_FULL = 1 << 20  # bytes that are free on a disk that counts as full


@dataclass(frozen=True, slots=True)
class RankEnd:
    """The end of a rank, as it was recorded; `text` is the gist of its message, `time` in seconds of the epoch."""

    rank: int
    host: str
    kind: FailureKind
    text: str
    time: float
    samples: tuple[int, ...] = ()
    evaluation_set: str | None = None


@dataclass(frozen=True, slots=True)
class LaunchEnds:
    """A line of such a file.

    Attributes:
        cause: The rank that failed first; None: none did, or it isn't known.
        step: The last update that the run is known to have made.
        logs: Rank --> where its log began and ended, in bytes of the file.
        environment: Of the launcher.
    """

    file: str
    line: int
    attempt: str
    time: float
    kind: FailureKind
    text: str
    cause: int | None
    step: int | None
    ranks: tuple[RankEnd, ...]
    logs: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def is_refused(self) -> bool:
        """True if the start was refused: nothing was trained."""
        return self.kind.exit_code == FailureKind.CONFIG.exit_code


def file_name(node: int) -> str:
    """Return the name of the file that a node's launcher writes."""
    return ENDS if node == 0 else f"ends-{node}.jsonl"


def append_ends(
    logs: Path, node: int, ends: Sequence[End], hosts: Sequence[str], result: LaunchResult, began: Mapping[int, int]
) -> None:
    """Append the line of this launch, if that can be done; `began`: sizes of this host's logs before it."""
    now, moment = time.time(), time.monotonic()

    def record(rank: int, end: End) -> dict[str, Any]:
        fields = {"rank": rank, "host": hosts[rank], "kind": end.kind.name.lower(), "text": shareable(gist(end.text))}
        reading = {"samples": end.samples, "evaluation_set": end.evaluation_set} if end.samples else {}
        return {**fields, "time": round(now - moment + end.time, 3), **reading}

    with suppress(OSError):
        ended = streams.sizes(logs, [*began])
        line = {
            "attempt": (lock_holder(logs.parent) or b"").decode(errors="replace").strip(),
            "time": round(now, 3),
            "kind": result.kind.name.lower(),
            "code": result.code,
            "text": shareable(gist(result.text)),
            "step": step_reached(logs.parent) or None,
            "cause": first_cause(ends),
            "ranks": [record(rank, end) for rank, end in enumerate(ends)],
            "logs": {str(rank): [start, ended[rank]] for rank, start in began.items()},
            "environment": short_description(),
        }
        append_line(logs / file_name(node), json.dumps(line))


def read_ends(logs: Path) -> list[LaunchEnds]:
    """Return all lines of all nodes, node 0's first, as far as they can be read."""
    files = sorted(logs.glob("ends*.jsonl"), key=lambda file: (len(file.name), file.name))
    return [entry for file in files[:_MOST_HOSTS] for entry in _entries(file)]


def _entries(file: Path) -> list[LaunchEnds]:
    try:
        lines = read_bounded(file, MAX_JSON_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    entries = (_entry(f"{file.parent.name}/{file.name}", number, text) for number, text in enumerate(lines, 1))
    return [entry for entry in entries if entry is not None]


def _entry(file: str, number: int, text: str) -> LaunchEnds | None:
    try:
        line = json.loads(text)
        logs = {int(rank): (int(start), int(end)) for rank, (start, end) in line["logs"].items()}
        cause, step = (None if line[name] is None else int(line[name]) for name in ("cause", "step"))
        ranks, environment = tuple(map(_rank_end, line["ranks"])), dict(line["environment"])
        facts = (str(line["attempt"]), float(line["time"]), FailureKind[line["kind"].upper()], str(line["text"]))
        return LaunchEnds(file, number, *facts, cause, step, ranks, logs, environment)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
        return None


def _rank_end(rank: Mapping[str, Any]) -> RankEnd:
    samples = tuple(map(int, rank.get("samples", ())))
    facts = (int(rank["rank"]), str(rank["host"]), FailureKind[rank["kind"].upper()])
    return RankEnd(*facts, str(rank["text"]), float(rank["time"]), samples, rank.get("evaluation_set"))


def last_step(metrics: Path) -> int | None:
    """Return the step of the last whole line of metrics.jsonl; None if there is none."""
    step = as_number(last_record(metrics).get("step"))
    return int(step) if math.isfinite(step) else None


# --- the last launch of a run -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class LastLaunch:
    """The last launch of a run: its lines, of all hosts, node 0's first, and where each rank's log of it begins.

    `was_killed`: its launcher, which was Lockstep's, left no line.
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


def _decisions(run: Path) -> list[LaunchEnds]:
    """Return the lines of node 0's launcher, which decides for all."""
    return [entry for entry in read_ends(run / LOGS) if entry.file == f"{LOGS}/{ENDS}"]


def decided_ends(run: Path) -> list[LaunchEnds]:
    """Return how each start of a run's ranks ended, the first one first, without refused ones."""
    return [entry for entry in _decisions(run) if not entry.is_refused]


def survived_failures(run: Path, most: int) -> str:
    """Return a sentence about the failures that ranks were started again after, the newest last; empty: none."""
    entries = _decisions(run)
    failures = [entry for entry in entries if _is_failure(entry)]
    if not (is_finished(run) or held_by(run) is not None):  # it has ended with the last
        trained = [entry for entry in entries if not entry.is_refused]
        failures = [entry for entry in failures if entry is not trained[-1]]
    if not failures:
        return ""
    after = [f" (after step {entry.step:,})" if entry.step else "" for entry in failures]
    texts = [first_sentence(entry.text) + step for entry, step in zip(failures, after, strict=True)]
    newest = ", most recently" if len(failures) > most else ""
    return f"It survived {counted(len(failures), 'failure')}{newest}: {'; then '.join(texts[-most:])}."


def failure_before_refusals(run: Path) -> LaunchEnds | None:
    """Return the failure before starts that were all refused; None: there is none."""
    entries = _decisions(run)
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
