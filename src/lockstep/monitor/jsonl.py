"""Valid JSON whatever the numbers, and lines that are in the file whole or not at all.

{"loss": NaN}  ->  {"loss": null, "not_finite": {"loss": "nan"}}
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

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


class LineFile:
    """A file that lines are appended to, one write each, nothing buffered.

    A line that doesn't fit (a full disk) is taken back to its first byte, so the file stays valid to its end.

    Attributes:
        lost: lines that could not be written.
        reason: why the last one couldn't.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        self.lost = 0
        self.reason: OSError | None = None

    def write(self, text: bytes) -> bool:
        """Whether it is in the file. Never raises OSError."""
        try:
            self._write(text)
        except OSError as error:
            self.lost += 1
            self.reason = error
            return False
        return True

    def flush(self) -> None:
        """What was written is on the disk then, as far as the disk takes it. In whatever thread."""
        file = self._file
        if file is not None:
            with contextlib.suppress(OSError, ValueError):  # closed meanwhile
                os.fsync(file.fileno())

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _write(self, text: bytes) -> None:
        if self._file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab", buffering=0)
        written = 0
        try:
            while written < len(text):  # a nearly full disk takes a part; the next write says why
                written += self._file.write(text[written:])
        except OSError:
            if written:
                os.ftruncate(self._file.fileno(), os.fstat(self._file.fileno()).st_size - written)
            raise


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
