"""The images and tables of user code, and their files, such as RUN/media/attention-00000100.png of step 100."""

from __future__ import annotations

import json
import logging
import os
import re
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.core.media import Cell, LoggedImage, LoggedTable
from lockstep.monitor.jsonl import finite

if TYPE_CHECKING:
    from torch import Tensor

MOST_PIXELS = 2048 * 2048
MOST_ROWS = 1000
_MOST_COLUMNS = 100
_LONGEST_CELL = 1000
_log = logging.getLogger("lockstep.monitor")
MEDIA = "media"
MOST_BYTES = 2**30
_FILE = re.compile(r".+-(\d{8,})\.(png|json)")


def pixels_of(name: str, value: object) -> Tensor:
    """Return a copy of an image on its device, as uint8 [height, width, channels]. Raises TypeError, ValueError."""
    import torch

    tensor = torch.as_tensor(value).detach()
    if tensor.dtype is not torch.uint8 and not tensor.is_floating_point():
        kind = str(tensor.dtype).removeprefix("torch.")
        raise TypeError(
            f"log.image({name!r}): pixels are uint8 from 0 to 255 or floats from 0 to 1, got {kind}; convert them"
        )
    planes = tensor.unsqueeze(0) if tensor.ndim == 2 else tensor
    if planes.ndim != 3 or planes.shape[0] not in (1, 3, 4) or not planes.numel():
        raise ValueError(
            f"log.image({name!r}): expected [height, width] or [1, 3 or 4 channels, height, width], got a tensor "
            f"of shape {list(tensor.shape)}"
        )
    _, height, width = planes.shape
    if height * width > MOST_PIXELS:
        raise ValueError(f"log.image({name!r}): {width} x {height} is more than {MOST_PIXELS:,} pixels; shrink it")
    if planes.dtype is not torch.uint8:
        planes = (planes.float().nan_to_num(0.0).clamp(0.0, 1.0) * 255).round().to(torch.uint8)
    return planes.permute(1, 2, 0).contiguous().clone()


def read_image(pixels: Tensor) -> LoggedImage:
    """Return the image; waits for a device."""
    height, width, channels = pixels.shape
    return LoggedImage(width, height, channels, pixels.cpu().numpy().tobytes())


def table_of(name: str, columns: object, rows: object) -> LoggedTable:
    """Return a table, cut to 1,000 rows. Raises TypeError, ValueError."""
    wanted = f"log.table({name!r}, columns, rows)"
    names = tuple(map(str, _list(f"{wanted}: columns", columns)))
    if not 0 < len(names) <= _MOST_COLUMNS:
        raise ValueError(f"{wanted}: {len(names)} columns; a table has 1 to {_MOST_COLUMNS}")
    every = _list(f"{wanted}: rows", rows)
    kept = []
    for number, row in enumerate(every[:MOST_ROWS]):
        cells = _list(f"{wanted}: row {number}", row)
        if len(cells) != len(names):
            raise ValueError(f"{wanted}: row {number} has {len(cells)} cells, but there are {len(names)} columns")
        kept.append(tuple(_cell(f"{wanted}: row {number}", cell) for cell in cells))
    return LoggedTable(names, tuple(kept), len(every) - len(kept))


def _list(what: str, value: object) -> list[Any]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise TypeError(f"{what} must be a list, not {type(value).__name__}")
    return list(value)


def _cell(where: str, value: Any) -> Cell:
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return value if len(value) <= _LONGEST_CELL else value[: _LONGEST_CELL - 1] + "…"
    import numpy as np
    import torch

    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return _cell(where, value.item())
    raise TypeError(f"{where}: expected a string, a number, a bool or None, got {type(value).__name__}")


class MediaFolder:
    """Writes a file for each image and table, until the folder has as many bytes as it may have."""

    def __init__(self, folder: Path, most_bytes: int = MOST_BYTES) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        self._bytes: int | None = None
        self._warned = False

    def write(self, step: int, media: Mapping[str, LoggedImage | LoggedTable]) -> dict[str, dict[str, Any]]:
        """Write the files; return for each its path relative to the run's folder, and its size."""
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
