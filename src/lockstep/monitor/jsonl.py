"""Valid JSON whatever the numbers, and lines that are in the file whole or not at all.

{"loss": NaN}  ->  {"loss": null, "not_finite": {"loss": "nan"}}
"""

from __future__ import annotations

import json
import math
import os
import threading
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.core.flushing import flush
from lockstep.core.open_files import append_to, is_behind, reopened

_CHUNK = 2**20

_strict = json.JSONEncoder(allow_nan=False, ensure_ascii=False).encode


def line(record: Mapping[str, Any]) -> bytes:
    """One line of JSON. What isn't finite becomes null, and `not_finite` names it."""
    try:
        text = _strict(record)
    except ValueError:
        text = _strict({**finite(record), "not_finite": dict(_not_finite("", record))})
    # half of a surrogate pair, as in a text that wasn't UTF-8, becomes an escape that JSON knows
    return (text + "\n").encode("utf-8", "backslashreplace")


def finite(value: Any) -> Any:
    """The same JSON value with null for what isn't finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): finite(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return value


@dataclass(frozen=True, slots=True)
class FileMark:
    """How far a file had been written.

    Attributes:
        lines: or records, that it had.
        size: bytes.
        crc: CRC-32 of these bytes.
    """

    lines: int
    size: int
    crc: int


_NOTHING = FileMark(0, 0, 0)


def mark_of(path: Path) -> FileMark:
    """Of a file of lines as it is now; of none that isn't there, can't be read, or is no file (a device may have no
    end)."""
    if not path.is_file():
        return _NOTHING
    lines = size = crc = 0
    try:
        with path.open("rb") as file:
            for chunk in iter(lambda: file.read(_CHUNK), b""):
                lines, size, crc = lines + chunk.count(b"\n"), size + len(chunk), zlib.crc32(chunk, crc)
    except OSError:
        return _NOTHING
    return FileMark(lines, size, crc)


class LineFile:
    """A file that lines are appended to, one write each, nothing buffered.

    A line that doesn't fit (a full disk) is taken back to its first byte, so the file stays valid to its end.

    Attributes:
        lost: lines that could not be written.
        reason: why the last one couldn't.
        mark: how far it has been written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: int | None = None
        self._lock = threading.Lock()
        self._is_new = False
        self.lost = 0
        self.reason: OSError | None = None
        self.mark = mark_of(path)

    def write(self, text: bytes) -> bool:
        """Whether it is in the file. Never raises OSError."""
        try:
            with self._lock:
                self._write(text)
        except OSError as error:
            self.lost += 1
            self.reason = error
            return False
        return True

    def flush(self) -> None:
        """What was written is on the disk then. In whatever thread. Raises OSError."""
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

    def reopen(self) -> None:
        """Continues in a file of this name, if the one that is open was deleted, moved or replaced: with all that was
        written, or in the one that has replaced it. In whatever thread. Raises OSError."""
        with self._lock:
            if self._file is None or is_behind(self.path, self._file):
                return
            self.path.parent.mkdir(parents=True, exist_ok=True)
            old, self._file = self._file, reopened(self.path, self._file)
            os.close(old)
            found = os.fstat(self._file).st_size
            if found != self.mark.size:  # another file has taken its place
                self.mark = mark_of(self.path)

    def close(self) -> None:
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None

    def _write(self, text: bytes) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._is_new = not self.path.exists()
            self._file = append_to(self.path)
        written = 0
        try:
            while written < len(text):  # a nearly full disk takes a part; the next write says why
                written += os.write(self._file, text[written:])
        except OSError:
            if written:
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise
        mark = self.mark
        self.mark = FileMark(mark.lines + 1, mark.size + len(text), zlib.crc32(text, mark.crc))


def _not_finite(place: str, value: Any) -> list[tuple[str, str]]:
    if isinstance(value, float) and not math.isfinite(value):
        return [(place, repr(value))]
    if isinstance(value, Mapping):
        return [found for name, part in value.items() for found in _not_finite(_dotted(place, str(name)), part)]
    if isinstance(value, list | tuple):
        return [found for index, part in enumerate(value) for found in _not_finite(_dotted(place, str(index)), part)]
    return []


def _dotted(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name
