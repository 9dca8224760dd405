"""The memory that a save copies a rank's state into: its file, in chunks of a bounded size.

    [header | tensor a | tensor b ...][... tensor b | tensor c ...][... tensor c]     a tensor may span chunks

One block of many GB is hard to find, torch rounds page-locked memory up to a power of two, and while a driver locks
pages, an update's kernels may not start.
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
    """The bytes of a rank's file, in memory that `allocate` gets and later saves use again.

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
        self._whole: list[Tensor | None] | None = None  # by index in the layout; None: in several parts
        self._parts: dict[int, list[tuple[Tensor, tuple[slice, ...]]]] = {}

    @property
    def is_allocated(self) -> bool:
        return self._whole is not None

    def allocate(self) -> None:
        """Get the memory that is missing, and write the header; on any thread. Raises RuntimeError: there is none."""
        if self._whole is not None:
            return
        for start in range(len(self._chunks) * self._chunk_bytes, self._layout.size, self._chunk_bytes):
            chunk = self._new_chunk(min(self._chunk_bytes, self._layout.size - start))
            self._chunks.append(chunk)
            self._views.append(memoryview(cast("Any", chunk.numpy())))
        self.write(0, self._layout.header)
        whole = [self._place(index, *span) for index, span in enumerate(self._layout.spans())]
        self._whole = whole

    def copies(self, sources: Mapping[int, Source]) -> Iterator[Copy]:
        """Yield the copies that fill the image, of tensors by their index in the layout."""
        assert self._whole is not None, "an image is allocated before it is filled"
        for index, source in sources.items():
            target = self._whole[index]
            if target is not None:
                yield Copy(target, source, None)
                continue
            for part, where in self._parts[index]:
                yield Copy(part, source, where)

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
        """Yield the index of each chunk that has some of these bytes, and where they start and end in it."""
        size = self._chunk_bytes
        for index in range(start // size, -(-end // size)):
            yield index, max(start - index * size, 0), min(end - index * size, size)

    def _place(self, index: int, item: WriteItem, start: int, end: int) -> Tensor | None:
        """Return the memory of a tensor; None: it is in several chunks, whose parts are noted."""
        sizes, dtype = item.box.sizes, getattr(torch, item.info.dtype)
        whole, element, parts = Box((0,) * len(sizes), sizes), 0, []
        for chunk, low, high in self._within_chunks(start, end):
            memory = self._chunks[chunk][low:high].view(dtype)
            if high - low == end - start:
                return memory.view(sizes)
            for box in flat_boxes(sizes, element, element + len(memory)):
                part, memory = memory[: box.elements], memory[box.elements :]
                element += box.elements
                parts.append((part.view(box.sizes), box.within(whole)))
        self._parts[index] = parts
        return None
