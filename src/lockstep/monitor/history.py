"""One history over all attempts: what a run wrote beyond the step from which it goes on is cut off, and kept aside.

metrics.jsonl    ... step 470 | step 480 | step 490 | step 500      killed; the newest checkpoint is of step 480
                 --------- stays --------|--- earlier/1/metrics.jsonl
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeGuard

from lockstep.monitor.jsonl import FileMark, LineFile
from lockstep.monitor.tensorboard import records, step_of

_log = logging.getLogger("lockstep.monitor")
_Pieces = Iterator[tuple[bytes, bool]]
_LINES = ("metrics.jsonl", "events.jsonl")
_TENSORBOARD = "tensorboard/"
_CURVES = re.compile(r"tensorboard/events\.out\.tfevents\.[\w.-]+")
_MOST_FAULTS = 8


def rewind(run: Path, step: int, aside: Path) -> None:
    """Cuts metrics, events and curves in a run's folder off after `step`; what was cut lies in `aside` then.

    Raises OSError.
    """
    for name in _LINES:
        _cut(run / name, aside / name, lambda data: _lines(data, step))
    for file in sorted((run / "tensorboard").glob("events.out.tfevents.*")):
        _cut(file, aside / "tensorboard" / file.name, lambda data: _events(data, step))
    summary = run / "summary.json"  # of a run that was finished and has been given more to do
    if summary.exists():
        aside.mkdir(parents=True, exist_ok=True)
        summary.rename(aside / summary.name)


class HistoryFiles:
    """The files that a run appends to while it trains: metrics.jsonl, events.jsonl and TensorBoard's.

    Args:
        run: the run's folder.
        writers: that have files open there.
    """

    def __init__(self, run: Path, writers: Sequence[Writer] = ()) -> None:
        self._run = run
        self._writers = writers
        self._before = {name: mark for name, mark in _found(run) if name.startswith(_TENSORBOARD)}
        self._warned = False

    def flush(self) -> None:
        """What was written is on the disk then. In whatever thread. A disk that fails is reported once."""
        for file in self._files():
            try:
                file.flush()
            except OSError as error:
                if not self._warned:
                    self._warned = True
                    _log.warning("can't flush %s: %s; a power failure may take its last lines", file.path, error)

    def reopen(self) -> None:
        """Continues each file under its name, if it was deleted or moved meanwhile. In whatever thread.

        Raises OSError.
        """
        for file in self._files():
            file.reopen()

    def close(self) -> None:
        """They stay open until then: what is behind them may be all that is left."""
        for file in self._files():
            file.close()

    def marks(self) -> dict[str, list[int]]:
        """How far each file had been written: lines, bytes and CRC-32 by name, for `faults`."""
        now = {str(file.path.relative_to(self._run)): file.mark for file in self._files()}
        return {name: [mark.lines, mark.size, mark.crc] for name, mark in {**self._before, **now}.items() if mark.lines}

    def _files(self) -> Iterator[LineFile]:
        for writer in self._writers:
            yield from writer.files


class Writer(Protocol):
    """What appends to files."""

    @property
    def files(self) -> Sequence[LineFile]: ...


def faults(run: Path, written: object) -> list[str]:
    """Return what is wrong with a run's history, once it has been taken back to a checkpoint.

    Args:
        written: what `HistoryFiles.marks` said when the checkpoint was saved; anything else: not known.
    """
    known = written if isinstance(written, Mapping) else {}
    names = dict.fromkeys([*_LINES, *filter(_CURVES.fullmatch, known)])
    found = [fault for name in names for fault in _faults(run / name, name, known.get(name))]
    return found[:_MOST_FAULTS] + ([f"and {len(found) - _MOST_FAULTS} more"] if len(found) > _MOST_FAULTS else [])


def _faults(file: Path, name: str, mark: object) -> Iterator[str]:
    is_curve = name.startswith(_TENSORBOARD)
    what = "events" if is_curve else "lines"
    try:
        data = file.read_bytes()
    except FileNotFoundError:
        data = b""
    except OSError as error:
        yield f"{name} can't be read: {error}"
        return
    pieces = list(records(data)) if is_curve else data.splitlines(keepends=True)
    distinct = len(set(pieces))
    if distinct < len(pieces):
        twice = len(pieces) - distinct
        yield f"{name} has {twice:,} {what if twice > 1 else what[:-1]} twice"
    if _is_mark(mark) and not _is_prefix(data, FileMark(*mark)):
        missing = mark[0] - distinct
        if missing > 0:
            yield f"{name} lacks {missing:,} of {mark[0]:,} {what} that were written before"
        else:  # what came after the checkpoint, at its step, makes up for it
            yield f"{name} is not what was written: {what} are missing or were changed"


def _is_mark(mark: object) -> TypeGuard[list[int]]:
    return isinstance(mark, list) and len(mark) == 3 and all(isinstance(number, int) for number in mark)


def _is_prefix(data: bytes, mark: FileMark) -> bool:
    return len(data) >= mark.size >= 0 and zlib.crc32(data[: mark.size]) == mark.crc


def _found(run: Path) -> Iterator[tuple[str, FileMark]]:
    """What earlier attempts have written of curves."""
    for file in sorted((run / "tensorboard").glob("events.out.tfevents.*")):
        with contextlib.suppress(OSError):
            data = file.read_bytes()
            yield f"{_TENSORBOARD}{file.name}", FileMark(sum(1 for _ in records(data)), len(data), zlib.crc32(data))


def _cut(file: Path, aside: Path, pieces: Callable[[bytes], _Pieces]) -> None:
    if not file.exists():
        return
    data = file.read_bytes()
    kept, gone = bytearray(), bytearray()
    for piece, stays in pieces(data):
        (kept if stays else gone).extend(piece)
    if not gone and len(kept) == len(data):
        return
    aside.parent.mkdir(parents=True, exist_ok=True)
    aside.write_bytes(gone)
    temporary = file.with_name(f".{file.name}.new")
    with temporary.open("wb") as handle:
        handle.write(kept)
        handle.flush()
        os.fsync(handle.fileno())
    temporary.replace(file)


def _lines(data: bytes, step: int) -> _Pieces:
    """A last line that a kill has cut short goes too."""
    for line in data.splitlines(keepends=True):
        try:
            found = json.loads(line)["step"] if line.endswith(b"\n") else None
        except (ValueError, KeyError, TypeError):
            found = None
        yield line, found is not None and found <= step


def _events(data: bytes, step: int) -> _Pieces:
    for record in records(data):
        found = step_of(record)
        yield record, found is not None and found <= step
