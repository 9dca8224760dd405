"""The layout of one rank's file of a checkpoint, in the safetensors format.

    [length of header: 8][header: JSON, padded to 64][tensor][tensor]...     wide elements first, so all are aligned

The memory that a save copies state into is an image of this file, so it is written as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lockstep.checkpoint.manifest import ELEMENT_BYTES
from lockstep.checkpoint.write_plan import WriteItem

_ALIGNMENT = 64
_SAFETENSORS_DTYPES: Mapping[str, str] = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FileItem:
    """A write item and its bytes in the file: from `start` up to `end`."""

    item: WriteItem
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The layout of a rank's file.

    Attributes:
        header: All bytes before the first tensor.
        items: In the order of the file.
        size: Bytes of the file.
    """

    file: str
    header: bytes
    items: tuple[FileItem, ...]
    size: int


def file_layout(rank: int, items: Iterable[WriteItem]) -> FileLayout:
    """Lay out a rank's file; a part of a tensor has the key `NAME@OFFSET,OFFSET`."""
    spans: list[FileItem] = []
    header: dict[str, object] = {}
    end = 0
    for item in sorted(items, key=lambda item: -ELEMENT_BYTES[item.info.dtype]):
        start, end = end, end + item.box.elements * ELEMENT_BYTES[item.info.dtype]
        spans.append(FileItem(item, start, end))
        key = item.name if item.box == item.info.whole else f"{item.name}@{','.join(map(str, item.box.offsets))}"
        dtype = _SAFETENSORS_DTYPES[item.info.dtype]
        header[key] = {"dtype": dtype, "shape": list(item.box.sizes), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    before = len(text).to_bytes(8, "little") + text
    shifted = tuple(FileItem(span.item, len(before) + span.start, len(before) + span.end) for span in spans)
    return FileLayout(shard_file(rank), before, shifted, len(before) + end)


def shard_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"
