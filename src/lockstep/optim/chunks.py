"""Parameters with what belongs to them, in chunks: an update's temporaries exist for one chunk at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

CHUNK_BYTES = 64 * 2**20
"""Enough that a kernel's launch costs little beside its work on any accelerator."""

Columns = tuple[list["Tensor"], ...]


def chunks(columns: Columns) -> Iterator[Columns]:
    """Yield lists of corresponding tensors, of `CHUNK_BYTES` at most; a larger tensor is split, if it is contiguous."""
    chunk: Columns = tuple([] for _ in columns)
    size = 0
    for row in zip(*columns, strict=True):
        row_bytes = row[0].nbytes
        if size and size + row_bytes > CHUNK_BYTES:
            yield chunk
            chunk, size = tuple([] for _ in columns), 0
        if row_bytes > CHUNK_BYTES and all(tensor.is_contiguous() for tensor in row):
            parts = (tensor.view(-1).split(CHUNK_BYTES // row[0].element_size()) for tensor in row)
            for part in zip(*parts, strict=True):
                yield tuple([tensor] for tensor in part)
            continue
        for column, tensor in zip(chunk, row, strict=True):
            column.append(tensor)
        size += row_bytes
    if size:
        yield chunk
