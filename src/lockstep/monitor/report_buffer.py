"""The buffer of the first rank's reports, in memory that outlives it: what its threads had not yet written.

    update --> report --> queue of the thread that writes files, once a second --> metrics.jsonl, events.jsonl
                  '-----> buffer, at once (10 us)        the rank is killed --> `mend` adds the lines that are missing

Two files take turns, so that the newest megabyte of reports is always there. The first rank may fail in an update that
another rank has finished: a state that the other one saves alone comes with that update's report (`entry_of`).
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from lockstep.core.records import EvaluationReport, Request, StepReport, Verdict
from lockstep.monitor.events import EVENTS, EventLog
from lockstep.monitor.jsonl import LineFile
from lockstep.monitor.metric_log import Logged
from lockstep.monitor.monitors import EpochReport

_FILES = ("reports.jsonl", "reports-before.jsonl")
_MOST_BYTES = 2**20  # of a file
_NEWEST = 100  # lines, among which is that of the newest step
_END = 2**24  # bytes of a file of the run that are looked at
_METRICS = "metrics.jsonl"
_STEP_FIELDS = tuple(field.name for field in fields(StepReport) if field.name not in ("verdict", "requests"))


class ReportBuffer:
    """Takes the reports that files are written of. One that can't be written any more is given up.

    Args:
        folder: In memory.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._handle: int | None = None
        self._size = 0
        with suppress(OSError):
            self._open()

    def see(self, report: StepReport) -> None:
        self._add_text(entry_of(report))

    def evaluated(self, report: EvaluationReport) -> None:
        self._add_text(entry_of_evaluation(report))

    def epoch(self, report: EpochReport) -> None:
        self._add({"epoch": asdict(report)})

    def logged(self, step: int, logged: Logged) -> None:
        """Take values and texts; histograms and media are too large."""
        self._add({"logged": [step, dict(logged.values), dict(logged.texts)]})

    def close(self) -> None:
        if self._handle is not None:
            os.close(self._handle)
            self._handle = None

    def _add(self, entry: Mapping[str, Any]) -> None:
        self._add_text(json.dumps(entry))

    def _add_text(self, text: str) -> None:
        if self._handle is None:
            return
        line = (text + "\n").encode()
        try:
            if self._size + len(line) > _MOST_BYTES:
                self.close()
                os.replace(self._folder / _FILES[0], self._folder / _FILES[1])
                self._open()
            self._size += os.write(self._handle, line)
        except OSError:  # memory is full
            self.close()

    def _open(self) -> None:
        self._handle = os.open(self._folder / _FILES[0], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._size = os.fstat(self._handle).st_size


def entry_of(report: StepReport) -> str:
    """Return a report as a line of the buffer."""
    return json.dumps({"see": [*(getattr(report, name) for name in _STEP_FIELDS), report.verdict.value]})


def entry_of_evaluation(report: EvaluationReport) -> str:
    """Return an evaluation's report as a line of the buffer."""
    return json.dumps({"evaluated": asdict(report)})


def clear(folder: Path | None) -> None:
    """Empty a buffer: its run starts over."""
    if folder is not None:
        for name in _FILES:
            (folder / name).unlink(missing_ok=True)


def mend(run: Path, folder: Path | None, step: int, every: int, last: Sequence[str] = ()) -> None:
    """Add to metrics.jsonl and events.jsonl the lines up to `step` that a rank which was killed had not yet written.

    Args:
        run: The run's folder, rewound to `step`, or as a rank that was killed has left it: a last line that isn't whole
            is replaced.
        folder: Of the buffer; None: there is none.
        every: Steps between the lines of metrics.jsonl.
        last: Reports of update `step` and its evaluation that came with the state, as `entry_of` returns them.

    Raises:
        OSError: The lines can't be added; the buffer still has them.
    """
    taken = [*(_entries(folder) if folder is not None else ()), *map(json.loads, last)]
    entries = [entry for entry in taken if _step_of(entry) <= step]
    if not entries:
        return
    try:
        metrics, events = _replayed(entries, every, folder)
    except OSError:  # memory is full
        metrics, events = _replayed(entries, every, None)
    for file in (run / _METRICS, run / EVENTS):
        _remove_torn_end(file)
    newest = max(map(_step_of_line, _last_lines(run / _METRICS)[-_NEWEST:]), default=0.0)
    _append(run / _METRICS, [line for line in metrics if _step_of_line(line) > newest])
    present = {_event_of(line) for line in _last_lines(run / EVENTS)}
    missing = {event: line for line in events if (event := _event_of(line)) not in present}
    _append(run / EVENTS, [*missing.values()])


def _replayed(entries: Sequence[Mapping[str, Any]], every: int, folder: Path | None) -> tuple[list[bytes], list[bytes]]:
    """Return the lines of metrics.jsonl and events.jsonl that reports make. Raises OSError.

    Args:
        folder: Where they are written meanwhile; None: among the temporary files.
    """
    with tempfile.TemporaryDirectory(dir=folder) as name:
        metrics, events = Path(name) / _METRICS, Path(name) / EVENTS
        _replay(entries, metrics, every)
        return _lines(metrics), _lines(events)


def _replay(entries: Sequence[Mapping[str, Any]], metrics: Path, every: int) -> None:
    log = EventLog(metrics, every)
    seen = 0
    for entry in entries:
        match entry:
            case {"see": [*values, verdict]}:
                report = StepReport(
                    **dict(zip(_STEP_FIELDS, values, strict=True)),
                    verdict=Verdict(verdict),
                    requests=frozenset[Request](),
                )
                if report.step > seen:
                    log.see(report)
                seen = max(seen, report.step)
            case {"evaluated": values}:
                log.evaluated(EvaluationReport(**values))
            case {"epoch": values}:
                log.epoch(EpochReport(**values))
            case {"logged": [step, values, texts]}:
                log.logged(step, Logged(values=values, texts=texts))
    for file in log.files:
        _close(file)


def _close(file: LineFile) -> None:
    """Close a file of lines. Raises OSError if it lacks one."""
    file.close()
    if file.reason is not None:
        raise file.reason


def _entries(folder: Path) -> list[dict[str, Any]]:
    """Return what was taken, oldest first. A line that a kill has truncated is left out."""
    entries = []
    for name in reversed(_FILES):
        for line in _lines(folder / name):
            with suppress(ValueError):
                entries.append(json.loads(line))
    return entries


def _step_of(entry: Mapping[str, Any]) -> float:
    match entry:
        case {"see": [step, *_]} | {"logged": [step, *_]} | {"evaluated": {"step": step}} | {"epoch": {"step": step}}:
            return float(step)
    return float("inf")


def _step_of_line(line: bytes) -> float:
    """Return the step of a line of metrics.jsonl; 0 if it has none: another program has written it."""
    with suppress(ValueError, LookupError, TypeError, RecursionError):
        return float(json.loads(line)["step"])
    return 0.0


def _event_of(line: bytes) -> object:
    """Return what identifies an event, of which lines may differ.

    The seconds of an evaluation differ between ranks, and the buffer has no histograms and media of what was logged.
    """
    with suppress(ValueError, LookupError, TypeError, AttributeError, RecursionError):  # another program has written it
        if line.startswith(b'{"evaluation":'):
            record = json.loads(line)
            return json.dumps([record["evaluation"], record["step"]])
        if line.startswith(b'{"logged":'):
            record = json.loads(line)
            taken = {name: value for name, value in record["logged"].items() if not isinstance(value, Mapping)}
            return json.dumps([taken, record["step"]])
    return line


def _lines(file: Path) -> list[bytes]:
    try:
        return file.read_bytes().splitlines(keepends=True)
    except OSError:
        return []


def _last_lines(file: Path) -> list[bytes]:
    """Return the last lines of a file, of 16 MiB at most, which is far more than a buffer has."""
    try:
        with file.open("rb") as opened:
            start = max(0, opened.seek(0, os.SEEK_END) - _END)
            opened.seek(start)
            lines = opened.read().splitlines(keepends=True)
    except OSError:
        return []
    return lines[1:] if start else lines


def _remove_torn_end(file: Path) -> None:
    """Remove a last line that a kill has truncated; what is appended to it would be lost, too. Raises OSError."""
    last = (_last_lines(file) or [b"\n"])[-1]
    if not last.endswith(b"\n"):
        os.truncate(file, file.stat().st_size - len(last))


def _append(file: Path, lines: list[bytes]) -> None:
    if lines:
        target = LineFile(file)
        target.write(b"".join(lines))
        _close(target)
