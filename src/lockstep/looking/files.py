"""Reads parts of a run's files: what is missing, damaged, a link or no file counts as empty.

metrics.jsonl   |-- --  --  --  --  --|     losses, of blocks spread over the file
                                   |--|     its last records
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.core.files import MAX_JSON_BYTES, opened_regular, read_bounded
from lockstep.monitor.discards import passed

_LOSS = re.compile(
    rb'^\{"step": (\d{1,15}),.*?"loss": (null|-?[\d.]+(?:e[-+]?\d+)?)(?!, "count": 0\.0,)[,}](.*"kept": false)?',
    re.MULTILINE,
)
_BLOCK = 1 << 12
_BLOCKS = 12
_END = 1 << 14


def read_object(file: Path) -> Mapping[str, Any]:
    """Return a file's JSON object; empty if it has none."""
    try:
        content = None if file.is_symlink() else json.loads(read_bounded(file, MAX_JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def last_records(file: Path, size: int) -> list[dict[str, Any]]:
    """Return the JSON objects in the last `size` bytes of a file of lines."""
    return read_tail(file, size)[0]


def read_tail(file: Path, size: int) -> tuple[list[dict[str, Any]], int]:
    """Return the JSON objects in the last `size` bytes of a file of lines, and the number of lines that are damaged.

    The last line of a file may be on its way: it counts only once it has its end.
    """
    try:
        with opened_regular(file) as handle:
            begin = max(0, os.fstat(handle).st_size - size)
            lines = os.pread(handle, size, begin).split(b"\n")
    except OSError:
        return [], 0
    whole = lines[1:] if begin else lines
    parsed = [_object(text) for text in whole]
    records = [record for record in parsed if record is not None]
    return records, sum(record is None and bool(text) for text, record in zip(whole[:-1], parsed, strict=False))


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def sampled_losses(file: Path) -> list[tuple[int, float]]:
    """Return step and loss of some records of metrics.jsonl, the first and the last among them; NaN: not finite.

    Updates without a sample have none. Discarded updates count only if they are many in a row at the end.
    """
    try:
        with opened_regular(file) as handle:
            size = os.fstat(handle).st_size
            if size <= _BLOCK * _BLOCKS:
                parts = [os.pread(handle, size, 0)]
            else:
                begins = ((size - _BLOCK) * number // (_BLOCKS - 1) for number in range(_BLOCKS - 1))
                parts = [*(os.pread(handle, _BLOCK, begin) for begin in begins), os.pread(handle, _END, size - _END)]
    except OSError:
        return []
    matches = [match for part in parts for match in _LOSS.finditer(part)]
    losses = {int(match[1]): _number(match[2]) for match in matches}
    gone = passed([int(match[1]) for match in matches if match[3]], max(losses, default=0))
    return sorted((step, loss) for step, loss in losses.items() if step not in gone)


def _number(text: bytes) -> float:
    try:
        return float("nan") if text == b"null" else float(text)
    except ValueError:
        return float("nan")
