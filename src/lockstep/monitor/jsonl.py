"""JSON files of a run: lines are written completely or not at all, and missing or damaged ones read as empty."""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.core.files import MAX_JSON_BYTES, append_to, flush, opened_regular, read_bounded

_log = logging.getLogger("lockstep.monitor")
_strict = json.JSONEncoder(allow_nan=False, ensure_ascii=False).encode


def line(record: Mapping[str, Any]) -> bytes:
    """Return one line of JSON. What isn't finite becomes null, and `not_finite` lists it."""
    try:
        text = _strict(record)
    except ValueError:
        text = _strict({**finite(record), "not_finite": dict(_not_finite("", record))})
    # half of a surrogate pair, as in a text that wasn't UTF-8, becomes an escape that JSON allows
    return (text + "\n").encode("utf-8", "backslashreplace")


def finite(value: Any) -> Any:
    """Return the same JSON value with null for what isn't finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return value


def _not_finite(path: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, float) and not math.isfinite(value):
        return [(path, repr(value))]
    parts = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list | tuple) else ()
    return [entry for name, part in parts for entry in _not_finite(f"{path}.{name}" if path else str(name), part)]


def as_number(value: object, otherwise: float = math.nan) -> float:
    """Return a finite number as a float; `otherwise` for anything else."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300
    return float(value) if is_number and isinstance(value, int | float) else otherwise


def parsed(text: bytes | str) -> dict[str, Any] | None:
    """Return a JSON object; None if the text is none."""
    try:
        record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def read_object(file: Path) -> dict[str, Any]:
    """Return a file's JSON object; empty if it has none."""
    try:
        return (None if file.is_symlink() else parsed(read_bounded(file, MAX_JSON_BYTES))) or {}
    except OSError:
        return {}


def read_tail(file: Path, size: int) -> list[dict[str, Any]]:
    """Return the JSON objects in the last `size` bytes of a file of lines."""
    return [record for text in _last_lines(file, size) if (record := parsed(text)) is not None]


def last_record(file: Path) -> dict[str, Any]:
    """Return the last whole line of a file of JSON objects; empty if there is none."""
    for size in (1 << 15, 1 << 22):  # a line of 1,024 ranks has 100 KB
        for text in reversed(_last_lines(file, size)):
            if (record := parsed(text)) is not None:
                return record
    return {}


def _last_lines(file: Path, size: int) -> list[bytes]:
    try:
        with opened_regular(file) as handle:
            begin = max(0, os.fstat(handle).st_size - size)
            lines = os.pread(handle, size, begin).split(b"\n")
    except OSError:
        return []
    return lines[1:] if begin else lines


class LineFile:
    """A file that lines are appended to, unbuffered. A line that a full disk cuts is removed again, with a warning."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None
        self._lock = threading.Lock()
        self._is_new = False
        self.lost = 0

    def write(self, text: bytes) -> bool:
        """Return whether it is in the file. Never raises OSError."""
        try:
            with self._lock:
                self._write(text)
        except OSError as error:
            self.lost += 1
            if self.lost == 1:
                _log.warning("can't write %s: %s; the run continues without those lines", self.path, error)
            return False
        return True

    def flush(self) -> None:
        """Flush what was written to the disk, in any thread. Raises OSError."""
        with self._lock:
            if self._file is None:
                return
            handle, is_new, self._is_new = os.dup(self._file), self._is_new, False
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
        if is_new:
            flush(self.path.parent)

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None
        if self.lost:
            _log.warning("%s lacks %d lines", self.path, self.lost)
            self.lost = 0

    def _write(self, text: bytes) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._is_new = not self.path.exists()
            self._file = append_to(self.path)
        written = 0
        try:
            while written < len(text):  # a nearly full disk takes a part; the next write raises the reason
                written += os.write(self._file, text[written:])
        except OSError:
            if written:
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise
