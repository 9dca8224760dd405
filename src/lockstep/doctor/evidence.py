"""The lines of a run's files that show known failures. Of each file, which may be huge, a bounded part is read."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.core.failure_kinds import FailureKind
from lockstep.doctor.known_failures import KNOWN, KnownFailure, Standing, failure_in, failure_of
from lockstep.launch.ends_file import LastLaunch, LaunchEnds
from lockstep.monitor.folder import LOGS

_MOST_READ = 16 << 20  # bytes of a file: its end
_MOST_SKIPPED = 1 << 30  # bytes before them where lines are counted
_MOST_LOGS = 1024
_MOST_SEARCHED = 4000  # characters of a line that are searched for a failure
_LONGEST_LINE = 1 << 16  # characters kept of a line
_LOG_NAME = re.compile(r"rank-(\d+)\.log")


@dataclass(frozen=True, slots=True)
class LogEvidence:
    """A line of a run's file, about these training samples. `rank` is None outside of logs."""

    file: str
    line: int
    text: str
    rank: int | None = None
    samples: tuple[int, ...] = ()


@dataclass(slots=True)
class SeenFailure:
    """A known failure, and the lines that show it: the last ones of each file."""

    failure: KnownFailure
    evidence: list[LogEvidence] = field(default_factory=list)


def seen_failures(run: Path, last: LastLaunch) -> list[SeenFailure]:
    """Return the failures that the files of the last launch show, the cause first."""
    lines: dict[str, list[LogEvidence]] = {}
    for line, failure in (*_of_ends(last.records), *_of_files(run, last)):
        lines.setdefault(failure.name, []).append(line)
    if FailureKind.OUT_OF_MEMORY.title in lines:  # the rank's own report, or torch's, has the advice that fits
        lines[FailureKind.OUT_OF_MEMORY.title] += lines.pop(FailureKind.HOST_MEMORY.title, [])
    by_name = {failure.name: failure for failure in KNOWN}
    explained = {line.rank for name, all_of in lines.items() if by_name[name].standing is Standing.CAUSE
                 and name != FailureKind.EXCEPTION.title for line in all_of}  # fmt: skip
    raised = [line for line in lines.pop(FailureKind.EXCEPTION.title, []) if line.rank not in explained]
    lines.update({FailureKind.EXCEPTION.title: raised} if raised else {})
    seen = [SeenFailure(by_name[name], evidence) for name, evidence in lines.items()]
    return sorted(seen, key=lambda item: (item.failure.standing, KNOWN.index(item.failure)))


def _of_ends(records: Sequence[LaunchEnds]) -> Iterator[tuple[LogEvidence, KnownFailure]]:
    """Yield what node 0's launcher recorded: the message of the launch, and of ranks that it isn't about."""
    for record in records[:1]:
        ends = [
            (end.rank, end.kind, f"rank {end.rank} on {end.host}: {end.text}", end)
            for end in record.ranks
            if end.kind.is_failure and not (record.kind.is_failure and end.text in record.text)
        ]
        cause = next((end for end in record.ranks if end.rank == record.cause), None)
        of_launch = [(record.cause, record.kind, record.text, cause)] if record.kind.is_failure else []
        for rank, kind, text, end in [*of_launch, *ends]:
            if (failure := failure_of(kind, text)) is not None:
                samples = end.samples if end is not None and end.evaluation_set is None else ()
                yield LogEvidence(record.file, record.line, text, rank, samples), failure


def _of_files(run: Path, last: LastLaunch) -> Iterator[tuple[LogEvidence, KnownFailure]]:
    logs = [(file, "", rank) for rank, file in rank_logs(run).items()]
    others = [(run / name, name, None) for name in sorted({failure.file for failure in KNOWN} - {""})]
    for file, name, rank in [*logs, *others]:
        kept: dict[str, tuple[LogEvidence, KnownFailure]] = {}
        for number, text in _lines(file, last.log_starts.get(rank, 0) if rank is not None else 0):
            failure = failure_in(text[:_MOST_SEARCHED], name)
            if failure is not None:
                line = LogEvidence(str(file.relative_to(run)), number, text.strip(), rank)
                kept[failure.name] = line, failure
        yield from kept.values()


def rank_logs(run: Path) -> dict[int, Path]:
    folder = run / LOGS
    files = sorted(folder.glob("rank-*.log")) if folder.is_dir() else []
    return {int(match[1]): file for file in files[:_MOST_LOGS] if (match := _LOG_NAME.fullmatch(file.name))}


def silent_ranks(run: Path, seen: Sequence[SeenFailure]) -> list[int]:
    """Return the ranks without a failure in their logs, while others have one: they were killed, or hang."""
    reporting = {line.rank for item in seen for line in item.evidence if item.failure.standing is not Standing.REMARK}
    only_consequences = all(item.failure.standing is not Standing.CAUSE for item in seen)
    return (
        [rank for rank in rank_logs(run) if rank not in reporting] if reporting - {None} and only_consequences else []
    )


def last_line_of(file: Path) -> str:
    """Return the last line with text; may be empty."""
    lines = [text for _, text in _lines(file) if text.strip()]
    return lines[-1] if lines else ""


def _lines(file: Path, since: int = 0) -> Iterator[tuple[int, str]]:
    """Yield number and text of the lines at a regular file's end, from byte `since` on."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NONBLOCK)
    except FileNotFoundError:
        return
    with open(handle, "rb") as opened:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            return
        number = 0
        start = max(min(since, status.st_size), status.st_size - _MOST_READ)
        if 0 < start <= _MOST_SKIPPED:
            while opened.tell() < start:
                number += opened.read(min(1 << 20, start - opened.tell())).count(b"\n")
        opened.seek(start)
        for part in opened.read(_MOST_READ).split(b"\n"):
            number += 1
            text = part[:_LONGEST_LINE].decode("utf-8", "replace").rstrip()
            more = len(part) - _LONGEST_LINE
            yield number, f"{text} ... {more:,} more bytes" if more > 0 else text
