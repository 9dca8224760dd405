"""One rank's file of a checkpoint: safetensors, laid out before a byte of it is copied.

    [length of header: 8][header: JSON, padded to 64][tensor][tensor]...     wide elements first, so all are aligned

The memory that a save copies state into is an image of this file, so writing it is writing memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from lockstep.checkpoint.boxes import Piece
from lockstep.checkpoint.manifest import ELEMENT_BYTES

_ALIGNMENT = 64
_SAFETENSORS: Mapping[str, str] = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Placed:
    """A piece and its bytes in the file: from `at` up to `end`."""

    piece: Piece
    at: int
    end: int


@dataclass(frozen=True, slots=True)
class Layout:
    """Attributes:
    header: all bytes before the first tensor.
    places: in the order of the file.
    size: bytes of the file.
    """

    file: str
    header: bytes
    places: tuple[Placed, ...]
    size: int


def file_of(rank: int) -> str:
    return f"rank-{rank:05d}.safetensors"


def lay_out(file: str, pieces: Iterable[Piece]) -> Layout:
    """Any safetensors reader understands the file; a part of a tensor is named `NAME@OFFSET,OFFSET`."""
    ordered = sorted(pieces, key=lambda piece: -ELEMENT_BYTES[piece.kind.dtype])
    spans: list[tuple[Piece, int, int]] = []
    end = 0
    for piece in ordered:
        start, end = end, end + piece.box.elements * ELEMENT_BYTES[piece.kind.dtype]
        spans.append((piece, start, end))
    header = _header({_key(piece): _described(piece, start, end) for piece, start, end in spans})
    data = len(header)
    places = tuple(Placed(piece, data + start, data + stop) for piece, start, stop in spans)
    return Layout(file, header, places, data + end)


def _header(tensors: Mapping[str, object]) -> bytes:
    text = json.dumps(tensors, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _key(piece: Piece) -> str:
    if piece.box == piece.kind.whole:
        return piece.name
    return f"{piece.name}@{','.join(map(str, piece.box.offsets))}"


def _described(piece: Piece, start: int, end: int) -> object:
    return {
        "dtype": _SAFETENSORS[piece.kind.dtype],
        "shape": list(piece.box.sizes),
        "data_offsets": [start, end],
    }
