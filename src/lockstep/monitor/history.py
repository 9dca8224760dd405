"""The files of a run's history: flushed with each save, and rewound to the checkpoint that an attempt resumes from."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from mmap import ACCESS_READ, mmap
from pathlib import Path

from lockstep.core.files import write_atomically
from lockstep.monitor.jsonl import LineFile, as_number, parsed
from lockstep.monitor.media import MEDIA, rewind_media

_log = logging.getLogger("lockstep.monitor")
_LINE_FILES = ("metrics.jsonl", "events.jsonl", "ranks.jsonl")
_EVALUATION = b'{"evaluation":'
_LATE = 100  # updates that a line may be behind the one before it
_FLUSH_S = 20.0  # a save's thread waits for the writers' threads


def rewind(run: Path, step: int, archive: Path, *, repeats_evaluations: bool = False) -> None:
    """Move what a run's metrics and events have after `step` to `archive`. Raises OSError.

    TensorBoard itself drops later steps, see `monitor.tensorboard`.

    Args:
        repeats_evaluations: Move evaluations at `step`, too: a rank failed in one, and the run repeats it.
    """
    for name in _LINE_FILES:
        _rewind_file(run / name, archive / name, step, _EVALUATION if repeats_evaluations else None)
    rewind_media(run / MEDIA, archive / MEDIA, step)
    summary = run / "summary.json"  # of a run that was finished, and is continued
    if summary.exists():
        archive.mkdir(parents=True, exist_ok=True)
        summary.rename(archive / summary.name)


class HistoryFiles:
    """The files that a run appends to while it trains; `drains` wait at most some seconds for the writers' threads."""

    def __init__(self, files: Sequence[LineFile] = (), drains: Sequence[Callable[[float], object]] = ()) -> None:
        self._files = files
        self._drains = drains
        self._warned = False

    def flush(self) -> None:
        """Flush all files to the disk, in any thread. A disk that fails is a warning, once."""
        until = time.monotonic() + _FLUSH_S
        for drain in self._drains:  # a disk that hangs may leave files shorter, but valid
            drain(max(0.0, until - time.monotonic()))
        for file in self._files:
            try:
                file.flush()
            except OSError as error:
                if not self._warned:
                    self._warned = True
                    _log.warning("can't flush %s: %s; a power failure may take its last lines", file.path, error)

    def close(self) -> None:
        for file in self._files:
            file.close()


def _rewind_file(file: Path, archive: Path, step: int, repeated: bytes | None) -> None:
    """Move the lines after `step`, those without a step, and those at `step` that begin with `repeated`.

    Only the file's end is read.
    """
    if not file.exists() or not (end := file.stat().st_size):
        return
    kept, removed, at = list[bytes](), list[bytes](), math.nan
    with file.open("rb") as opened, mmap(opened.fileno(), 0, access=ACCESS_READ) as data:
        while end and not at <= step - _LATE:
            begin = data.rfind(b"\n", 0, end - 1) + 1
            entry, end = data[begin:end], begin
            at = as_number((parsed(entry) or {}).get("step")) if entry.endswith(b"\n") else math.nan
            stays = at < step or (at == step and (repeated is None or not entry.startswith(repeated)))
            (kept if stays else removed).append(entry)
    if not removed:
        return
    archive.parent.mkdir(parents=True, exist_ok=True)
    archive.write_bytes(b"".join(reversed(removed)))
    if kept:  # a line that came late
        write_atomically(file, file.read_bytes()[:end] + b"".join(reversed(kept)))
    else:
        os.truncate(file, end)
