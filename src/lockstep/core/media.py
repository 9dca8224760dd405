"""Images and tables that user code logs, as plain values that can be pickled."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass

Cell = str | int | float | bool | None

_COLOR_TYPES = {1: 0, 3: 2, 4: 6}  # gray, RGB, RGBA, as PNG numbers them


@dataclass(frozen=True, slots=True)
class LoggedImage:
    """An image of 8 bits a channel.

    Attributes:
        channels: 1 (gray), 3 (RGB) or 4 (RGBA).
        pixels: Row by row from the top, channels together.
    """

    width: int
    height: int
    channels: int
    pixels: bytes

    def png(self) -> bytes:
        """Return the image as a PNG file (ISO/IEC 15948), every row unfiltered."""
        head = struct.pack(">IIBBBBB", self.width, self.height, 8, _COLOR_TYPES[self.channels], 0, 0, 0)
        stride = self.width * self.channels
        rows = b"".join(b"\0" + self.pixels[at : at + stride] for at in range(0, len(self.pixels), stride))
        chunks = (("IHDR", head), ("IDAT", zlib.compress(rows, 6)), ("IEND", b""))
        return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(kind.encode(), data) for kind, data in chunks)


@dataclass(frozen=True, slots=True)
class LoggedTable:
    """A table; `left_out` is the number of rows beyond the most that are kept."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    left_out: int = 0

    def markdown(self, most: int) -> str:
        """Return the first `most` rows as a Markdown table."""
        more = len(self.rows) - most + self.left_out if len(self.rows) > most else self.left_out
        lines = [_line(self.columns), _line(["---"] * len(self.columns)), *map(_line, self.rows[:most])]
        return "\n".join([*lines, *([f"\n{more:,} more rows"] if more else [])])


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _line(cells: tuple[Cell, ...] | list[str]) -> str:
    return f"| {' | '.join(_escaped(cells))} |"


def _escaped(cells: tuple[Cell, ...] | list[str]) -> Iterator[str]:
    for cell in cells:
        yield "" if cell is None else str(cell).replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")
