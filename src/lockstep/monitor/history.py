"""The history of a run over all its attempts, rewound to the checkpoint that an attempt resumes from.

metrics.jsonl    ... step 470 | step 480 | step 490 | step 500      killed; the newest checkpoint is of step 480
                 --------- stays --------|--- earlier/1/metrics.jsonl
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import re
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, cast

from lockstep.core.files import write_atomically
from lockstep.monitor.jsonl import FileMark, LineFile
from lockstep.monitor.media_folder import MEDIA, rewind_media
from lockstep.monitor.tensorboard import records, step_of

if TYPE_CHECKING:
    from lockstep.monitor.events import EventLog
    from lockstep.monitor.meter_files import MeterFiles
    from lockstep.monitor.tensorboard import TensorBoard

_log = logging.getLogger("lockstep.monitor")
_EVENTS = "events.jsonl"
_LINE_FILES = ("metrics.jsonl", _EVENTS, "ranks.jsonl")
_TENSORBOARD = "tensorboard/"
_NOTES = "tensorboard.json"
_EVENT_FILE = re.compile(r"tensorboard/events\.out\.tfevents\.[\w.-]+")
_RESUMED, _EVALUATION = b'{"resumed":', b'{"evaluation":'
_MAX_FAULTS = 8
_LATE = 100  # updates that an entry may be behind the one before it
_END = 2**20  # bytes of a file of lines that are read at first: a run that starts again doesn't wait for all of it
_FLUSH_S = 20.0  # a save's thread waits for the writers' threads
_MARK_S = 1.0  # an update that begins a save does


def rewind(run: Path, step: int, archive: Path, memory: Path | None = None) -> None:
    """Move what a run's metrics, events and TensorBoard files have after `step` to `archive`. Raises OSError.

    Args:
        memory: Folder of the launcher, in which it is noted what TensorBoard files have, so that those of earlier
            attempts aren't read at each start; None: there is none.
    """
    for name in _LINE_FILES:
        _rewind_file(run / name, archive / name, _split_lines, _step_of_line, step)
    noted, notes = _noted(memory), {}
    for file in _event_files(run):
        last = noted.get(_version(file), math.inf)  # step
        if last > step:
            _rewind_file(file, archive / "tensorboard" / file.name, records, step_of, step)
        notes[_version(file)] = min(last, step)
    if memory is not None:
        with contextlib.suppress(OSError):  # it is full
            write_atomically(memory / _NOTES, json.dumps(notes), durable=False)
    rewind_media(run / MEDIA, archive / MEDIA, step)
    summary = run / "summary.json"  # of a run that was finished, and is continued
    if summary.exists():
        archive.mkdir(parents=True, exist_ok=True)
        summary.rename(archive / summary.name)


def remove_evaluations(run: Path, step: int, archive: Path) -> None:
    """Move evaluations at `step` from events.jsonl to `archive`: the run that resumes there repeats them.

    A rank may have failed in an evaluation that the first one had finished. Raises OSError.
    """

    def step_of_other_line(line: bytes) -> float | None:
        at = _step_of_line(line)
        return None if at == step and line.startswith(_EVALUATION) else at

    _rewind_file(run / _EVENTS, archive / _EVENTS, _split_lines, step_of_other_line, step)


def _noted(memory: Path | None) -> dict[str, int]:
    """Return up to which steps TensorBoard files go, by what `_version` returns."""
    if memory is not None:
        with contextlib.suppress(OSError, ValueError):
            return cast("dict[str, int]", json.loads((memory / _NOTES).read_bytes()))
    return {}


def _version(file: Path) -> str:
    """Return the name of a file with what changes when it is written."""
    status = file.stat()
    return f"{file.name} {status.st_size} {status.st_mtime_ns}"


class HistoryFiles:
    """The files that a run appends to while it trains: metrics.jsonl, events.jsonl, ranks.jsonl, TensorBoard's.

    Args:
        run: The run's folder.
        monitors: Those that write files there.
        drains: Wait, a number of seconds at most, until threads have written what the monitors were shown.
    """

    def __init__(
        self,
        run: Path,
        monitors: Sequence[EventLog | MeterFiles | TensorBoard] = (),
        drains: Sequence[Callable[[float], object]] = (),
    ) -> None:
        self._run = run
        self._monitors = monitors
        self._drains = drains
        self._earlier = _event_files(run)  # of TensorBoard, of earlier attempts
        self._warned = False

    def flush(self) -> None:
        """Flush all files to the disk, in any thread. A disk that fails is reported once."""
        self._drain(_FLUSH_S)
        for file in self._files():
            try:
                file.flush()
            except OSError as error:
                if not self._warned:
                    self._warned = True
                    _log.warning("can't flush %s: %s; a power failure may take its last lines", file.path, error)

    def close(self) -> None:
        """Close all files."""
        for file in self._files():
            file.close()

    def marks(self) -> dict[str, list[int]]:
        """Return how far each file has been written: lines, bytes and CRC-32 by name, for `faults`."""
        self._drain(_MARK_S)
        marks = self._marks_of_earlier | {str(file.path.relative_to(self._run)): file.mark for file in self._files()}
        return {name: [mark.lines, mark.size, mark.crc] for name, mark in marks.items() if mark.lines}

    @cached_property
    def _marks_of_earlier(self) -> dict[str, FileMark]:
        """The marks of files that don't change any more, read at the first save: all ranks wait for a start."""
        marks = {}
        for file in self._earlier:
            with contextlib.suppress(OSError):
                data = file.read_bytes()
                mark = FileMark(sum(1 for _ in records(data)), len(data), zlib.crc32(data))
                marks[f"{_TENSORBOARD}{file.name}"] = mark
        return marks

    def _drain(self, seconds: float) -> None:
        """Wait until the files have all that was reported; a disk that hangs may leave them shorter, but valid."""
        until = time.monotonic() + seconds
        for drain in self._drains:
            drain(max(0.0, until - time.monotonic()))

    def _files(self) -> Iterator[LineFile]:
        for monitor in self._monitors:
            yield from monitor.files


def faults(run: Path, written: object) -> list[str]:
    """Return what is wrong with a run's history after it was rewound to a checkpoint.

    Args:
        written: What `HistoryFiles.marks` returned when the checkpoint was saved; anything else: unknown.
    """
    marks = written if isinstance(written, Mapping) else {}
    names = dict.fromkeys([*_LINE_FILES, *filter(_EVENT_FILE.fullmatch, marks)])
    messages = [message for name in names for message in _faults(run / name, name, marks.get(name))]
    more = [f"and {len(messages) - _MAX_FAULTS} more"] if len(messages) > _MAX_FAULTS else []
    return messages[:_MAX_FAULTS] + more


def _faults(file: Path, name: str, mark: object) -> Iterator[str]:
    is_event_file = name.startswith(_TENSORBOARD)
    what = "events" if is_event_file else "lines"
    known = _known_mark(mark)
    try:
        data = file.read_bytes() if known is not None or is_event_file else _end_of(file, _END)
    except FileNotFoundError:
        data = b""
    except OSError as error:
        yield f"{name} can't be read: {error}"
        return
    is_whole = known is not None and known.size <= len(data) and zlib.crc32(data[: known.size]) == known.crc
    if is_whole and not is_event_file and len(data) > _END:  # what is before the end was looked at after earlier starts
        data = data[-_END:].partition(b"\n")[2]
    entries = list(records(data)) if is_event_file else data.splitlines(keepends=True)
    distinct = len(set(entries))
    resumes = [entry for entry in entries if entry.startswith(_RESUMED)]  # two attempts may begin at the same step
    if twice := len(entries) - distinct - (len(resumes) - len(set(resumes))):
        yield f"{name} has {twice:,} {what if twice > 1 else what[:-1]} twice"
    if known is None or is_whole:
        return
    if known.lines > distinct:
        yield f"{name} lacks {known.lines - distinct:,} of {known.lines:,} {what} that were written before"
    else:  # what was written after the checkpoint, at its step, hides how many are missing
        yield f"{name} is not what was written: {what} are missing or were changed"


def _known_mark(mark: object) -> FileMark | None:
    if isinstance(mark, list) and len(mark) == 3 and all(isinstance(number, int) and number >= 0 for number in mark):
        return FileMark(*mark)
    return None


def _event_files(run: Path) -> list[Path]:
    return sorted((run / "tensorboard").glob("events.out.tfevents.*"))


def _rewind_file(
    file: Path,
    archive: Path,
    split: Callable[[bytes], Iterator[bytes]],
    step_of_entry: Callable[[bytes], float | None],
    step: int,
) -> None:
    """Move the entries after `step`, and those without a step, to `archive`.

    Only the file's end is looked at: entries are written in the order of steps, but for a few that come late.
    """
    if not file.exists():
        return
    size = file.stat().st_size
    length = _END if split is _split_lines else size  # records can't be found from the end
    while True:
        data = _end_of(file, length)
        entries = list(split(data))
        last = len(entries)
        steps: list[float | None] = []
        while last and (not steps or steps[-1] is None or steps[-1] > step - _LATE):
            last -= 1
            steps.append(step_of_entry(entries[last]))
        if last or length >= size:
            break
        length *= 8
    stays = [before is not None and before <= step for before in reversed(steps)]
    if all(stays):
        return
    removed = b"".join(entry for entry, keep in zip(entries[last:], stays, strict=True) if not keep)
    archive.parent.mkdir(parents=True, exist_ok=True)
    archive.write_bytes(removed)
    if data.endswith(removed):
        os.truncate(file, size - len(removed))
        return
    with file.open("rb") as whole:
        before = whole.read(size - len(data))
    kept = b"".join(
        [before, *entries[:last], *(entry for entry, keep in zip(entries[last:], stays, strict=True) if keep)]
    )
    temporary = file.with_name(f".{file.name}.new")
    with temporary.open("wb") as handle:
        handle.write(kept)
        handle.flush()
        os.fsync(handle.fileno())
    temporary.replace(file)


def _end_of(file: Path, length: int) -> bytes:
    """Return the last lines of a file, of that many bytes at most; all of a file that isn't longer."""
    with file.open("rb") as opened:
        start = max(0, opened.seek(0, os.SEEK_END) - length)
        opened.seek(max(0, start - 1))
        if start:
            opened.readline()
        return opened.read()


def _split_lines(data: bytes) -> Iterator[bytes]:
    return iter(data.splitlines(keepends=True))


def _step_of_line(line: bytes) -> float | None:
    """Return the step of a line; None if it has none, or a kill has truncated it."""
    try:
        step = json.loads(line)["step"] if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int | float) else None
