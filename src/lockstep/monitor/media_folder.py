"""The images and tables that user code logs, as files of the run.

RUN/media/attention-00000100.png      an image, by its name and step
RUN/media/errors-00000100.json        a table: {"columns": [...], "rows": [[...]], "left_out": 0}
"""

from __future__ import annotations

import json
import logging
import os
import re
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lockstep.core.media import LoggedImage, LoggedTable
from lockstep.monitor.jsonl import finite

_log = logging.getLogger("lockstep.monitor")
MEDIA = "media"
MOST_BYTES = 2**30
_FILE = re.compile(r".+-(\d{8,})\.(png|json)")


class MediaFolder:
    """Writes a file for each image and table, until the folder has as many bytes as it may have."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        self._bytes: int | None = None
        self._warned = False

    def write(self, step: int, media: Mapping[str, LoggedImage | LoggedTable]) -> dict[str, dict[str, Any]]:
        """Return what events.jsonl has of each: its file, relative to the run's folder, and its size."""
        records = {}
        for name, value in media.items():
            suffix, data = (".png", value.png()) if isinstance(value, LoggedImage) else (".json", _table(value))
            file = self._folder / f"{file_name(name)}-{step:08d}{suffix}"
            try:
                is_written = self._write(file, data)
            except OSError as error:
                is_written = False
                self._warn(f"can't write {file}: {error.strerror or error}; the run continues without such files")
            path = f"{self._folder.name}/{file.name}" if is_written else None
            records[name] = {**_size(value), "file": path}
        return records

    def _write(self, file: Path, data: bytes) -> bool:
        if self._bytes is None:
            self._folder.mkdir(exist_ok=True)
            self._bytes = sum(entry.stat().st_size for entry in os.scandir(self._folder))
        if self._bytes + len(data) > self._most_bytes:
            self._warn(f"{self._folder} has {self._bytes:,} bytes: further images and tables are not kept there")
            return False
        temporary = file.with_name(f".{file.name}.new")
        temporary.write_bytes(data)
        temporary.replace(file)
        self._bytes += len(data)
        return True

    def _warn(self, text: str) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("%s", text)


def rewind_media(folder: Path, archive: Path, step: int) -> None:
    """Move the files of steps after `step` to `archive`. Raises OSError."""
    for file in sorted(folder.glob("*")):
        match = _FILE.fullmatch(file.name)
        if match is not None and int(match[1]) > step:
            archive.mkdir(parents=True, exist_ok=True)
            file.rename(archive / file.name)


def file_name(name: str) -> str:
    """Return a file name for any name; different ones for different names."""
    safe = re.sub(r"[^\w\-.]+", "_", name).lstrip(".")[:100]
    return safe if safe == name else f"{safe}-{zlib.crc32(name.encode('utf-8', 'surrogatepass')):08x}"


def _table(table: LoggedTable) -> bytes:
    record = {"columns": table.columns, "rows": finite(table.rows), "left_out": table.left_out}
    return json.dumps(record, ensure_ascii=False, allow_nan=False).encode("utf-8", "backslashreplace")


def _size(value: LoggedImage | LoggedTable) -> dict[str, int]:
    if isinstance(value, LoggedImage):
        return {"width": value.width, "height": value.height}
    return {"columns": len(value.columns), "rows": len(value.rows), "left_out": value.left_out}
