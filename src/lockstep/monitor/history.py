"""One history over all attempts: what a run wrote beyond the step from which it goes on is cut off, and kept aside.

metrics.jsonl    ... step 470 | step 480 | step 490 | step 500      killed; the newest checkpoint is of step 480
                 --------- stays --------|--- earlier/1/metrics.jsonl
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from lockstep.monitor.tensorboard import records, step_of

_Pieces = Iterator[tuple[bytes, bool]]
_CHUNK = 2**20


def rewind(run: Path, step: int, aside: Path) -> None:
    """Cuts metrics, events and curves in a run's folder off after `step`; what was cut lies in `aside` then.

    Raises OSError.
    """
    for name in ("metrics.jsonl", "events.jsonl"):
        _cut(run / name, aside / name, lambda data: _lines(data, step))
    for file in sorted((run / "tensorboard").glob("events.out.tfevents.*")):
        _cut(file, aside / "tensorboard" / file.name, lambda data: _events(data, step))
    summary = run / "summary.json"  # of a run that was finished and has been given more to do
    if summary.exists():
        aside.mkdir(parents=True, exist_ok=True)
        summary.rename(aside / summary.name)


def count_lines(metrics: Path) -> int:
    """Lines of metrics.jsonl; 0 if it isn't there, can't be read, or is no file (a device may have no end)."""
    if not metrics.is_file():
        return 0
    try:
        with metrics.open("rb") as file:
            return sum(chunk.count(b"\n") for chunk in iter(lambda: file.read(_CHUNK), b""))
    except OSError:
        return 0


def faults(metrics: Path, written: int | None) -> list[str]:
    """Return what is wrong with metrics.jsonl, once it has been taken back to a checkpoint.

    Args:
        written: lines that it had when the checkpoint was saved; None: not known.
    """
    try:
        steps = [json.loads(line)["step"] for line in metrics.read_bytes().splitlines()]
    except FileNotFoundError:
        steps = []
    except (OSError, ValueError, KeyError, TypeError) as error:
        return [f"{metrics.name} can't be read: {error}"]
    found = []
    distinct = len(set(steps))
    if distinct < len(steps):
        found.append(f"{metrics.name} has {len(steps) - distinct:,} lines twice")
    if written is not None and distinct < written:
        found.append(f"{metrics.name} lacks {written - distinct:,} of {written:,} lines that were written before")
    return found


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
