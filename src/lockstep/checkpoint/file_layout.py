"""The layout of one rank's file, in the safetensors format. The memory of a save is an image of this file.

    [length of header: 8][header: JSON, padded to 64][tensor][tensor]...     wide elements first, so all are aligned

    header     {"__metadata__": {"xxh3_128": "5f0c..."}, "model.w@0,64": {"dtype", "shape", "data_offsets"}, ...}

The metadata has the hashes of all 16 MiB blocks, in the order of the file, 32 characters each. The manifest has the
hash of the header.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.checkpoint import hashing
from lockstep.checkpoint.hashing import HASH_CHARACTERS
from lockstep.checkpoint.manifest import ELEMENT_BYTES, MAX_HEADER, CorruptCheckpoint, shard_file
from lockstep.core.errors import RunFailed
from lockstep.distributed.shard_boxes import Box, TensorInfo

_ALIGNMENT = 64
_METADATA, _HASHES = "__metadata__", "xxh3_128"
_SAFETENSORS_DTYPES: Mapping[str, str] = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_DTYPES = {short: dtype for dtype, short in _SAFETENSORS_DTYPES.items()}


@dataclass(frozen=True, slots=True)
class WriteItem:
    """A box of a tensor that one rank writes contiguously."""

    name: str
    info: TensorInfo
    box: Box


@dataclass(frozen=True, slots=True)
class FileLayout:
    """The layout of a rank's file.

    Attributes:
        header: All bytes before the first tensor, with zeros where the hashes will be, from `hashes_at`.
        starts: Where each item begins in the file.
    """

    file: str
    header: bytes
    hashes_at: int
    items: tuple[WriteItem, ...]
    starts: tuple[int, ...]
    size: int

    def spans(self) -> Iterator[tuple[WriteItem, int, int]]:
        """Yield each item and its bytes in the file: from a start up to an end."""
        return zip(self.items, self.starts, (*self.starts, self.size)[1:], strict=True)


def file_layout(rank: int, items: Iterable[WriteItem]) -> FileLayout:
    """Lay out a rank's file. Raises RunFailed if it holds more parts than a header may list."""
    ordered = sorted(items, key=lambda item: -ELEMENT_BYTES[item.info.dtype])
    starts: list[int] = []
    header: dict[str, Any] = {_METADATA: {_HASHES: ""}}
    end = num_blocks = 0
    for item in ordered:
        start, end = end, end + item.box.elements * ELEMENT_BYTES[item.info.dtype]
        num_blocks += -(-(end - start) // hashing.BLOCK_BYTES)
        starts.append(start)
        key = part_key(item.name, item.info, item.box)
        if key in header:
            raise RunFailed(f"two tensors would be saved as {key}: rename one of them")
        dtype = _SAFETENSORS_DTYPES[item.info.dtype]
        header[key] = {"dtype": dtype, "shape": item.box.sizes, "data_offsets": (start, end)}
    header[_METADATA][_HASHES] = "0" * (num_blocks * HASH_CHARACTERS)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    before = len(text).to_bytes(8, "little") + text
    if len(before) > MAX_HEADER:
        raise RunFailed(f"rank {rank} holds {len(ordered):,} parts, too many for one safetensors file; use more ranks")
    hashes_at = 8 + len(f'{{"{_METADATA}":{{"{_HASHES}":"')
    shifted = tuple(len(before) + start for start in starts)
    return FileLayout(shard_file(rank), before, hashes_at, tuple(ordered), shifted, len(before) + end)


def part_key(name: str, info: TensorInfo, box: Box) -> str:
    """Return a part's key in a header: the tensor's name, with the part's offsets unless it is the whole tensor."""
    return name if box.sizes == info.shape else f"{name}@{','.join(map(str, box.offsets))}"


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part of a tensor in a file: its first byte, its bytes, and the hashes of its blocks in a row."""

    name: str
    box: Box
    at: int
    size: int
    hashes: str

    def hash_of(self, block: int) -> str:
        return self.hashes[block * HASH_CHARACTERS : (block + 1) * HASH_CHARACTERS]


class FileTable:
    """The parts of a file of `size` bytes, as its header lists them.

    Raises CorruptCheckpoint if the header is invalid, or doesn't account for every byte of the file.
    """

    def __init__(self, file: str, header: memoryview, size: int) -> None:
        self._file = file
        try:
            self._read(json.loads(bytes(header[8:])), len(header), size)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            raise self._corrupt(f"{type(error).__name__}: {str(error)[:200]}") from None

    def _read(self, entries: dict[str, Any], first: int, size: int) -> None:
        hashes: str = entries.pop(_METADATA)[_HASHES]
        self._parts: dict[str, tuple[str, tuple[int, ...], int, int, str]] = {}
        at, digit = first, 0
        for key, entry in entries.items():
            start, end = entry["data_offsets"]
            if first + start != at or end < start:
                raise ValueError(f"bytes {at:,} to {first + start:,} belong to two tensors or to none")
            digits = -(-(end - start) // hashing.BLOCK_BYTES) * HASH_CHARACTERS
            self._parts[key] = entry["dtype"], tuple(entry["shape"]), at, end - start, hashes[digit : digit + digits]
            at, digit = at + end - start, digit + digits
        if at != size or len(hashes) != digit:
            raise ValueError(
                f"it lists {at:,} of {size:,} bytes, and {len(hashes):,} of {digit:,} characters of hashes"
            )

    def __len__(self) -> int:
        return len(self._parts)

    def part(self, name: str, info: TensorInfo, box: Box) -> StoredPart:
        """Return a part of a tensor. Raises CorruptCheckpoint if the file doesn't have it."""
        key = part_key(name, info, box)
        if key not in self._parts:
            raise self._corrupt(f"it has no {key}")
        dtype, shape, at, size, hashes = self._parts[key]
        if (_DTYPES.get(dtype), shape, size) != (info.dtype, box.sizes, box.elements * ELEMENT_BYTES[info.dtype]):
            raise self._corrupt(f"{key} is {str(dtype)[:20]} {str(shape)[:200]}, in {size:,} bytes")
        return StoredPart(name, box, at, size, hashes)

    def _corrupt(self, reason: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(self._file, f"its header contradicts the manifest, or itself: {reason}")
