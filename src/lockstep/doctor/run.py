"""Diagnosis of a run: its files, read with the catalog.

    logs/ends*.jsonl                              --> how the last launch ended, and each of its ranks
    logs/rank-*.log  metrics.jsonl  events.jsonl  --> lines that show a known failure --> causes first, with evidence
    summary.json, run.lock                        --> finished, running, or ended
    metrics.jsonl                                 --> a loss that diverged, or never improved
    environment.json, checkpoints                 --> what has changed since an earlier start

Files may be torn, huge or another person's: of each, a bounded part is read, and links out of the folder are refused.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
import textwrap
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lockstep.core.errors import ConfigError, Paused, Stopped, named_ranks
from lockstep.core.terminal import plain_line
from lockstep.doctor.known_failures import KNOWN, KnownFailure, Standing, failure_in
from lockstep.doctor.locks import is_locked, lock_in_bucket
from lockstep.doctor.losses import divergence, no_improvement
from lockstep.doctor.starts import LastLaunch, changes_since_saved, differences_of_hosts, last_launch
from lockstep.launch.ends_file import RankEnd
from lockstep.monitor.folder import LOCK, LOGS, is_finished, is_run, refuse_escaping_links
from lockstep.report.run_data import RunData, read_run
from lockstep.training.store_lock import GONE_S

_MOST_READ = 16 << 20  # bytes of a file: its end
_MOST_SKIPPED = 1 << 30  # bytes before them in which lines are counted
_MOST_LOGS = 1024
_LONGEST_LINE, _SHOWN_LINE = 4000, 300  # characters
_MOST_EVIDENCE = 3  # lines of one failure
_MOST_RANKS = 8  # shown
_NO_FAILURES = ("done", "ended", "stopped", "paused", "interrupted")
_ENDS = {
    "done": "was done",
    "ended": "was ended by the launcher",
    "paused": "saved and stopped",
    "stopped": "was stopped",
}
"""How a rank without a message ended, by `EndKind`."""
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
        is_wrong: Whether the run failed, or its loss diverged.
        seen: Failures, the cause first.
        notes: What else matters, a sentence each.
        ranks: How the ranks of the last launch ended, the first cause first; empty if that isn't recorded.
    """

    run: Path
    state: str
    is_wrong: bool
    seen: tuple[SeenFailure, ...] = ()
    notes: tuple[str, ...] = ()
    ranks: tuple[RankEnd, ...] = ()


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
    last = last_launch(run, data.environment)
    seen = _seen(run, last)
    if is_finished(run):
        return _continuing(run, data, seen, f"finished ({_progress(data)})")
    holder, lives = lock_in_bucket(run) or ("", False)
    if is_locked(run / LOCK) or lives:
        return _continuing(run, data, seen, f"running ({_progress(data)} so far)")
    if lives is None:
        waits = f"if that has ended, the next start waits {GONE_S:g} s, and resumes"
        return _continuing(run, data, seen, f"locked by {holder} ({_progress(data)} so far); {waits}")
    if last.records:
        return _recorded(run, data, last, seen)
    if last.was_killed:
        state = f"ended after {_progress(data)}: its launcher was killed, or its machine stopped"
        advice = "The launcher left no record of the end. Run dmesg on its host, and see what the scheduler recorded."
        return Diagnosis(run, state, True, tuple(seen), (advice, *_notes(run, data, failed=True)))
    silent = _silent_ranks(run, seen)
    if len(_remarks(seen)) == len(seen):
        state = f"ended after {_progress(data)}, and its files show no failure: it was stopped, or killed"
        return Diagnosis(run, state, False, tuple(seen), _notes(run, data, failed=False))
    notes = _notes(run, data, failed=True)
    if silent:
        notes = (f"{named_ranks(silent)} ended without a message: killed, or hung. Run dmesg on that host.", *notes)
    return Diagnosis(run, f"failed after {_progress(data)}", True, tuple(seen), notes)


def _continuing(run: Path, data: RunData, seen: list[SeenFailure], state: str) -> Diagnosis:
    """Return the diagnosis of a run that is finished, or runs: what it survived is no fault."""
    diverged = divergence(data.columns["loss"]) is not None
    return Diagnosis(run, state, diverged, _remarks(seen), (*_of_losses(data), *data.flaws))


def _remarks(seen: Sequence[SeenFailure]) -> tuple[SeenFailure, ...]:
    return tuple(item for item in seen if item.failure.standing is Standing.REMARK)


def _recorded(run: Path, data: RunData, last: LastLaunch, seen: list[SeenFailure]) -> Diagnosis:
    """Return the diagnosis of a launch whose end its launchers have recorded; node 0's is the one that decided."""
    end = last.records[0]
    after, reason = f"after {_progress(data)}", end.text.partition("\n")[0]
    ranks = tuple(sorted(end.ranks, key=lambda rank: (rank.rank != end.cause, rank.time)))
    if end.code in (Paused.exit_code, Stopped.exit_code):
        state = f"stopped {after}{': ' * bool(reason)}{reason}"
        return Diagnosis(run, state, False, _remarks(seen), _notes(run, data, failed=False), ranks)
    verb = "refused" if end.code == ConfigError.exit_code else "failed"
    notes = (*differences_of_hosts(last.records), *_notes(run, data, failed=True))
    return Diagnosis(run, f"{verb} {after}: {reason or f'exit code {end.code}'}", True, tuple(seen), notes, ranks)


def _progress(data: RunData) -> str:
    step, wanted = data.last.get("step"), data.configured("run", "steps")
    if not isinstance(step, int):
        return "no update"
    return f"step {step}" + (f" of {wanted}" if isinstance(wanted, int) else "")


def _seen(run: Path, last: LastLaunch) -> list[SeenFailure]:
    """Return the failures that the files of the last launch show, the cause first."""
    by_name: dict[str, SeenFailure] = {}
    for record in last.records[:1]:
        for end in record.ranks:
            if end.end not in _NO_FAILURES and (failure := failure_in(end.text)) is not None:
                text = f"rank {end.rank} on {end.host}: {end.text}"[:_SHOWN_LINE]
                item = by_name.setdefault(failure.name, SeenFailure(failure))
                item.evidence.append(LogEvidence(record.file, record.line, text, end.rank))
    logs = [(file, "", int(match[1])) for file in _logs(run) if (match := _LOG_NAME.fullmatch(file.name))]
    others = [(run / name, name, None) for name in sorted({failure.file for failure in KNOWN} - {""})]
    for file, name, rank in [*logs, *others]:
        kept: dict[str, LogEvidence] = {}
        for number, text in _lines(file, last.log_starts.get(rank, 0) if rank is not None else 0):
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


def _lines(file: Path, since: int = 0) -> Iterator[tuple[int, str]]:
    """Yield number and text of the lines at a file's end; nothing if it is missing or no regular file.

    Args:
        since: Bytes before which lines are an earlier launch's.
    """
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
            yield number, part[:_LONGEST_LINE].decode("utf-8", "replace").rstrip()


def _silent_ranks(run: Path, seen: Sequence[SeenFailure]) -> list[int]:
    """Return the ranks whose logs have no failure, while others' do: they were killed, or hang."""
    reporting = {line.rank for item in seen for line in item.evidence if item.failure.standing is not Standing.REMARK}
    ranks = [int(match[1]) for file in _logs(run) if (match := _LOG_NAME.fullmatch(file.name))]
    only_consequences = all(item.failure.standing is not Standing.CAUSE for item in seen)
    return [rank for rank in ranks if rank not in reporting] if reporting - {None} and only_consequences else []


def _of_losses(data: RunData) -> list[str]:
    sentences = (divergence(data.columns["loss"]), no_improvement(data.columns["loss"]))
    return [next(text for text in sentences if text)] if any(sentences) else []


def _notes(run: Path, data: RunData, *, failed: bool) -> tuple[str, ...]:
    notes = [*_of_losses(data), *(changes_since_saved(run, data) if failed else ())]
    if data.restarts:
        times = len(data.restarts)
        notes.append(f"It was resumed {times} time{'s' * (times > 1)}, last from step {data.restarts[-1][0]}.")
    saved = [save.step for save in data.saves if save.failure is None]
    if saved:
        notes.append(f"The newest save is of step {saved[-1]}; resume: lockstep train {shlex.quote(str(run))}")
    return (*notes, *data.flaws)


# --- text and JSON ------------------------------------------------------------------------------------------------


def describe_run(diagnosis: Diagnosis, width: int) -> str:
    """Return the diagnosis as text: the state, the cause with its evidence, then what followed from it."""
    lines = [plain_line(f"{diagnosis.run}: {diagnosis.state}")]
    if diagnosis.is_wrong and diagnosis.ranks:
        lines += ["", *_of_ranks(diagnosis.ranks, width)]
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
    return "\n".join(lines)


def _of_ranks(ranks: Sequence[RankEnd], width: int) -> Iterator[str]:
    """Yield a line for each of the first ranks to end: which was first, and how long after it the others ended."""
    first = ranks[0].time
    for number, rank in enumerate(ranks[:_MOST_RANKS]):
        moment = (
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(first)) if number == 0 else f"{rank.time - first:+.1f} s"
        )
        line = plain_line(f"  rank {rank.rank} on {rank.host}  {moment}  {rank.text or _ENDS.get(rank.end, rank.end)}")
        yield line if len(line) <= width else f"{line[: width - 1]}…"
    if len(ranks) > _MOST_RANKS:
        yield f"  and {len(ranks) - _MOST_RANKS} more ranks"


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
        "ranks": [asdict(rank) for rank in diagnosis.ranks],
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
