"""Diagnosis of a run: its files, read with the catalog.

    logs/rank-*.log  metrics.jsonl  events.jsonl  --> lines that show a known failure --> causes first, with evidence
    summary.json, run.lock, checkpoints           --> finished, running, or ended

Files may be torn, huge or another person's: of each, a bounded part is read, and links out of the folder are refused.
"""

from __future__ import annotations

import os
import re
import stat
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lockstep.core.errors import ConfigError, named_ranks
from lockstep.core.terminal import plain_line
from lockstep.doctor.known_failures import KNOWN, KnownFailure, Standing, failure_in
from lockstep.doctor.locks import is_locked, lock_in_bucket
from lockstep.monitor.folder import LOCK, LOGS, is_finished, is_run, refuse_escaping_links
from lockstep.report.run_data import RunData, read_run
from lockstep.training.store_lock import GONE_S

_MOST_READ = 16 << 20  # bytes of a file: its end
_MOST_SKIPPED = 1 << 30  # bytes before them in which lines are counted
_MOST_LOGS = 1024
_LONGEST_LINE, _SHOWN_LINE = 4000, 300  # characters
_MOST_EVIDENCE = 3  # lines of one failure
_LOG_NAME = re.compile(r"rank-(\d+)\.log")


@dataclass(frozen=True, slots=True)
class LogEvidence:
    """A line of a run's file. `rank` is None outside of logs."""

    file: str
    line: int
    text: str
    rank: int | None = None


@dataclass(slots=True)
class SeenFailure:
    """A known failure, and the lines that show it: the last ones of each file."""

    failure: KnownFailure
    evidence: list[LogEvidence] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The diagnosis of a run.

    Attributes:
        state: A sentence.
        is_wrong: Whether the run failed.
        seen: Failures, the cause first.
        notes: What else matters, a sentence each.
    """

    run: Path
    state: str
    is_wrong: bool
    seen: tuple[SeenFailure, ...]
    notes: tuple[str, ...]


def diagnose_run(run: Path) -> Diagnosis:
    """Read a run's folder.

    Raises:
        ConfigError: It is not a run's folder, or a file in it is a link to the outside.
        OSError: A file can't be read.
    """
    if not is_run(run):
        raise ConfigError(f"{run} is not the folder of a run: it has neither config.yaml nor run.lock")
    refuse_escaping_links(run)
    data = read_run(run)
    seen = _seen(run)
    step = data.last.get("step")
    wanted = data.configured("run", "steps")
    where = (
        f"step {step}" + (f" of {wanted}" if isinstance(wanted, int) else "") if isinstance(step, int) else "no update"
    )
    if is_finished(run):
        return Diagnosis(run, f"finished ({where})", False, tuple(seen), _notes(data, [], run))
    holder, lives = lock_in_bucket(run) or ("", False)
    if is_locked(run / LOCK) or lives:
        return Diagnosis(run, f"running ({where} so far)", False, tuple(seen), _notes(data, [], run))
    if lives is None:
        state = (
            f"locked by {holder} ({where} so far); if that has ended, the next start waits {GONE_S:g} s, and resumes"
        )
        return Diagnosis(run, state, False, tuple(seen), _notes(data, [], run))
    silent = _silent_ranks(run, seen)
    fatal = [item for item in seen if item.failure.standing is not Standing.REMARK]
    if not fatal:
        state = f"ended after {where}, and its files show no failure: it was stopped, or killed"
        return Diagnosis(run, state, False, tuple(seen), _notes(data, silent, run))
    return Diagnosis(run, f"failed after {where}", True, tuple(seen), _notes(data, silent, run))


def _seen(run: Path) -> list[SeenFailure]:
    by_name: dict[str, SeenFailure] = {}
    logs = [(file, "", int(match[1])) for file in _logs(run) if (match := _LOG_NAME.fullmatch(file.name))]
    others = [(run / name, name, None) for name in sorted({failure.file for failure in KNOWN} - {""})]
    for file, name, rank in [*logs, *others]:
        kept: dict[str, LogEvidence] = {}
        for number, text in _lines(file):
            failure = failure_in(text, name)
            if failure is None:
                continue
            line = LogEvidence(str(file.relative_to(run)), number, text[:_SHOWN_LINE].strip(), rank)
            kept[failure.name] = line
            by_name.setdefault(failure.name, SeenFailure(failure))
        for key, line in kept.items():
            by_name[key].evidence.append(line)
    return sorted(by_name.values(), key=lambda item: (item.failure.standing, KNOWN.index(item.failure)))


def _logs(run: Path) -> list[Path]:
    folder = run / LOGS
    files = sorted(folder.glob("rank-*.log")) if folder.is_dir() else []
    return files[:_MOST_LOGS]


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    """Yield number and text of the lines at a file's end; nothing if it is missing or no regular file."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    with open(handle, "rb") as opened:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            return
        number = 0
        start = max(0, status.st_size - _MOST_READ)
        if 0 < start <= _MOST_SKIPPED:
            while opened.tell() < start:
                number += opened.read(min(1 << 20, start - opened.tell())).count(b"\n")
        opened.seek(start)
        for part in opened.read(_MOST_READ).split(b"\n"):
            number += 1
            yield number, part[:_LONGEST_LINE].decode("utf-8", "replace").rstrip()


def _silent_ranks(run: Path, seen: Sequence[SeenFailure]) -> list[int]:
    """Return the ranks whose logs have no failure, while others' do: they were killed, or hang."""
    reporting = {line.rank for item in seen for line in item.evidence if item.failure.standing is not Standing.REMARK}
    ranks = [int(match[1]) for file in _logs(run) if (match := _LOG_NAME.fullmatch(file.name))]
    only_consequences = all(item.failure.standing is not Standing.CAUSE for item in seen)
    return [rank for rank in ranks if rank not in reporting] if reporting - {None} and only_consequences else []


def _notes(data: RunData, silent: Sequence[int], run: Path) -> tuple[str, ...]:
    notes = []
    if silent:
        notes.append(f"{named_ranks(silent)} ended without a message: killed, or hung. Run dmesg on that host.")
    if data.restarts:
        notes.append(f"The run was resumed {len(data.restarts)} times, the last time from step {data.restarts[-1][0]}.")
    if data.saves and not data.summary:
        notes.append(f"The newest save is of step {data.saves[-1].step}; resume: lockstep train {run}")
    return (*notes, *data.flaws)


# --- text and JSON ------------------------------------------------------------------------------------------------


def describe_run(diagnosis: Diagnosis, width: int) -> str:
    """Return the diagnosis as text: the state, the cause with its evidence, then what followed from it."""
    lines = [f"{diagnosis.run}: {diagnosis.state}"]
    for number, item in enumerate(diagnosis.seen):
        failure = item.failure
        title = _title(failure.standing, is_first=number == 0)
        lines += ["", f"{title}: {failure.name}", *_wrapped(failure.cause, width)]
        for line in item.evidence[:_MOST_EVIDENCE]:
            shown = f"  {line.file}:{line.line}: {plain_line(line.text)}"
            lines.append(shown if len(shown) <= width else f"{shown[: width - 1]}…")
        if len(item.evidence) > _MOST_EVIDENCE:
            lines.append(f"  and in {len(item.evidence) - _MOST_EVIDENCE} more files")
        lines += _wrapped(f"-> {failure.remedy}", width)
    if diagnosis.notes:
        lines += ["", *(line for note in diagnosis.notes for line in _wrapped(note, width))]
    if not diagnosis.seen:
        lines.append("  nothing is wrong in its files")
    return "\n".join(lines)


def _title(standing: Standing, *, is_first: bool) -> str:
    if standing in (Standing.CAUSE, Standing.SYMPTOM):
        return "cause" if is_first else "also seen"
    return standing.name.lower()


def run_as_json(diagnosis: Diagnosis) -> dict[str, Any]:
    """Return the diagnosis for `--json`."""
    return {
        "run": str(diagnosis.run),
        "state": diagnosis.state,
        "wrong": diagnosis.is_wrong,
        "failures": [
            {
                **_as_json(item.failure),
                "evidence": [
                    {"file": line.file, "line": line.line, "rank": line.rank, "text": line.text}
                    for line in item.evidence
                ],
            }
            for item in diagnosis.seen
        ],
        "notes": list(diagnosis.notes),
    }


def describe_known(width: int) -> str:
    """Return the catalog as text."""
    lines = [f"{len(KNOWN)} known failures"]
    for failure in KNOWN:
        lines += ["", failure.name, *_wrapped(failure.cause, width), *_wrapped(f"-> {failure.remedy}", width)]
    return "\n".join(lines)


def known_as_json() -> list[dict[str, str]]:
    """Return the catalog for `--json`."""
    return [{**_as_json(failure), "pattern": failure.pattern.pattern, "file": failure.file} for failure in KNOWN]


def _as_json(failure: KnownFailure) -> dict[str, str]:
    standing = failure.standing.name.lower()
    return {"name": failure.name, "standing": standing, "cause": failure.cause, "remedy": failure.remedy}


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(plain_line(text), max(width, 40), initial_indent="  ", subsequent_indent="  ")
