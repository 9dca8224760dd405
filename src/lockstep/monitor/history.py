"""The history of a run over all its attempts, rewound to the checkpoint that an attempt resumes from.

metrics.jsonl    ... step 470 | step 480 | step 490 | step 500      killed; the newest checkpoint is of step 480
                 --------- stays --------|--- earlier/1/metrics.jsonl
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from lockstep.core.files import write_atomically
from lockstep.monitor.jsonl import LineFile
from lockstep.monitor.media import MEDIA, rewind_media

_log = logging.getLogger("lockstep.monitor")
_EVENTS = "events.jsonl"
_LINE_FILES = ("metrics.jsonl", _EVENTS, "ranks.jsonl")
_EVALUATION = b'{"evaluation":'
_FLUSH_S = 20.0  # a save's thread waits for the writers' threads


def rewind(run: Path, step: int, archive: Path) -> None:
    """Move what a run's metrics and events have after `step` to `archive`. Raises OSError.

    TensorBoard itself drops what it has of later steps, see `monitor.tensorboard`.
    """
    for name in _LINE_FILES:
        _rewind_file(run / name, archive / name, _step_of_line, step)
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

    _rewind_file(run / _EVENTS, archive / _EVENTS, step_of_other_line, step)


class HistoryFiles:
    """The files that a run appends to while it trains: metrics.jsonl, events.jsonl, ranks.jsonl, TensorBoard's.

    Args:
        drains: Wait, a number of seconds at most, until threads have written what they were shown.
    """

    def __init__(self, files: Sequence[LineFile] = (), drains: Sequence[Callable[[float], object]] = ()) -> None:
        self._files = files
        self._drains = drains
        self._warned = False

    def flush(self) -> None:
        """Flush all files to the disk, in any thread. A disk that fails is reported once."""
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
        """Close all files."""
        for file in self._files:
            file.close()


def _rewind_file(file: Path, archive: Path, step_of_line: Callable[[bytes], float | None], step: int) -> None:
    """Move the lines after `step`, and those without a step, to `archive`."""
    if not file.exists():
        return
    kept, removed = list[bytes](), list[bytes]()
    for entry in file.read_bytes().splitlines(keepends=True):
        before = step_of_line(entry)
        (removed if before is None or before > step else kept).append(entry)
    if not removed:
        return
    archive.parent.mkdir(parents=True, exist_ok=True)
    archive.write_bytes(b"".join(removed))
    write_atomically(file, b"".join(kept))


def _step_of_line(line: bytes) -> float | None:
    """Return the step of a line; None if it has none, or a kill has truncated it."""
    try:
        step = json.loads(line)["step"] if line.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return step if isinstance(step, int | float) else None
