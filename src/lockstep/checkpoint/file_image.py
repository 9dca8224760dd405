"""The memory that a save copies a rank's state into: its file, in chunks.

    [header | tensor a | tensor b ...][... tensor b | tensor c ...][... tensor c]     a tensor may span chunks

One block of many GB is hard to find, torch rounds page-locked memory up to a power of two, and updates' kernels may not
start while a driver locks pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, cast

import torch

from lockstep.distributed.shard_boxes import Box, flat_boxes

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.checkpoint.file_layout import FileLayout, WriteItem


Source: TypeAlias = "Tensor | Callable[[], Tensor]"
"""A tensor, or what reads it when it is copied."""


class Copy(NamedTuple):
    """A copy to the image: of the part `where` of a tensor; None: of all of it."""

    target: Tensor
    source: Source
    where: tuple[slice, ...] | None


class FileImage:
    """The bytes of a rank's file, in memory that later saves reuse.

    Args:
        chunk_bytes: Size of the chunks; a multiple of the size of every element.
        new_chunk: Returns memory of a number of bytes.
    """

    def __init__(self, layout: FileLayout, chunk_bytes: int, new_chunk: Callable[[int], Tensor]) -> None:
        self._layout = layout
        self._chunk_bytes = chunk_bytes
        self._new_chunk = new_chunk
        self._chunks: list[Tensor] = []
        self._views: list[memoryview] = []
        self._places: list[list[tuple[Tensor, tuple[slice, ...] | None]]] | None = None  # by index in the layout

    @property
    def is_allocated(self) -> bool:
        return self._places is not None

    def allocate(self) -> None:
        """Get the missing memory and write the header, on any thread. Raises RuntimeError if there is none."""
        if self._places is not None:
            return
        for start in range(len(self._chunks) * self._chunk_bytes, self._layout.size, self._chunk_bytes):
            chunk = self._new_chunk(min(self._chunk_bytes, self._layout.size - start))
            self._chunks.append(chunk)
            self._views.append(memoryview(cast("Any", chunk.numpy())))
        self.write(0, self._layout.header)
        self._places = [list(self._parts_of(*span)) for span in self._layout.spans()]

    def copies(self, sources: Mapping[int, Source]) -> Iterator[Copy]:
        """Yield the copies that fill the image, of tensors by their index in the layout."""
        assert self._places is not None, "an image is allocated before it is filled"
        for index, source in sources.items():
            for target, where in self._places[index]:
                yield Copy(target, source, where)

    def pieces(self, start: int = 0, end: int | None = None) -> list[memoryview]:
        """Return the bytes of the file from `start` up to `end`."""
        stop = self._layout.size if end is None else end
        return [self._views[index][low:high] for index, low, high in self._within_chunks(start, stop)]

    def write(self, at: int, data: bytes) -> None:
        """Write bytes into the file."""
        written = 0
        for piece in self.pieces(at, at + len(data)):
            piece[:] = data[written : written + len(piece)]
            written += len(piece)

    def _within_chunks(self, start: int, end: int) -> Iterator[tuple[int, int, int]]:
        size = self._chunk_bytes
        for index in range(start // size, -(-end // size)):
            yield index, max(start - index * size, 0), min(end - index * size, size)

    def _parts_of(self, item: WriteItem, start: int, end: int) -> Iterator[tuple[Tensor, tuple[slice, ...] | None]]:
        """Yield memory of a tensor, and its place in it; None: all of it."""
        sizes, dtype = item.box.sizes, getattr(torch, item.info.dtype)
        whole, element = Box((0,) * len(sizes), sizes), 0
        for chunk, low, high in self._within_chunks(start, end):
            memory = self._chunks[chunk][low:high].view(dtype)
            if high - low == end - start:
                yield memory.view(sizes), None
                return
            for box in flat_boxes(sizes, element, element + len(memory)):
                part, memory = memory[: box.elements], memory[box.elements :]
                element += box.elements
                yield part.view(box.sizes), box.within(whole)
