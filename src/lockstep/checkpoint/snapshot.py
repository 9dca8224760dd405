"""A copy of the training state, made while the next forward and backward run.

update k | forward, backward of k + 1            | update k + 1
         |  buffers   copied before the forward  |
         |  parameters, moments: copied meanwhile|  waits until they are

The next save reuses its memory: allocating it takes ten times as long as the copy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from lockstep.checkpoint.file_layout import FileLayout, WriteItem
from lockstep.distributed.shard_boxes import Box, flat_boxes, live_part, shard_view

Part = tuple[slice, ...] | None
"""A part of a tensor; None: all of it."""


class FileImage:
    """The bytes of a rank's file, in memory that later saves reuse.

        [header | tensor a | tensor b ...][... tensor b | tensor c ...][... tensor c]     a tensor may span chunks

    One block of many GB is hard to find, torch rounds page-locked memory up to a power of two, and updates' kernels may
    not start while a driver locks pages.

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
        self._places: list[list[tuple[Tensor, Part]]] | None = None  # by index in the layout

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

    def fill(self, sources: Mapping[int, Tensor]) -> None:
        """Copy tensors, by their index in the layout, without waiting for an accelerator."""
        assert self._places is not None, "an image is allocated before it is filled"
        copy((target, source, where) for index, source in sources.items() for target, where in self._places[index])

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

    def _parts_of(self, item: WriteItem, start: int, end: int) -> Iterator[tuple[Tensor, Part]]:
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


@torch.no_grad()
def copy(copies: Iterable[tuple[Tensor, Tensor, Part]]) -> None:
    """Copy parts of sources to targets, without waiting for an accelerator."""
    targets, sources = [], []
    for target, source, where in copies:
        targets.append(target)
        sources.append(source if where is None else source[where])
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=True)


CHUNK_BYTES = 2**26  # of page-locked memory


class Snapshot:
    """A copy of a rank's part of the state, in memory.

    From an accelerator it is copied to page-locked memory on a separate stream; an update's kernels wait for it. The
    host only waits for what `complete` copies: tensors on the host, and the first time all, since it allocates memory.
    `image` is complete from then until the next `begin`.
    """

    def __init__(self, layout: FileLayout, device: torch.device) -> None:
        self.layout = layout
        self._device = device
        self._is_on_host = device.type == "cpu"
        if self._is_on_host:
            self.image = FileImage(layout, layout.size, partial(torch.empty, dtype=torch.uint8))
            self.image.allocate()
        else:
            self.image = FileImage(layout, CHUNK_BYTES, page_locked)
            self._module = torch.get_device_module(device)
            self._stream = self._module.Stream(device)
        self._remaining: dict[int, Tensor] = {}
        self._done = threading.Event()
        self._done.set()
        self._copied: torch.Event | None = None

    def begin(self, tensors: Mapping[str, Tensor], changing: Collection[str]) -> None:
        """Begin the copy, on the main thread, between two updates. `changing`: names of what a forward may change."""
        now, later = _sources(self.layout, tensors, changing)
        if self._is_on_host:
            self.image.fill(now)
            self._remaining = later
        else:
            self._begin_on_stream(now, later)
        if self._remaining:
            self._done.clear()

    def _begin_on_stream(self, now: dict[int, Tensor], later: dict[int, Tensor]) -> None:
        current = self._module.current_stream(self._device)
        self._stream.wait_stream(current)
        with self._module.stream(self._stream):
            if self.image.is_allocated:
                self.image.fill(now)
                current.wait_event(self._stream.record_event())
                self._remaining = {index: source for index, source in later.items() if source.device.type == "cpu"}
                self.image.fill({index: later[index] for index in later.keys() - self._remaining.keys()})
            else:
                self._remaining = {**{index: source.clone() for index, source in now.items()}, **later}
                current.wait_event(self._stream.record_event())
            self._copied = self._stream.record_event()

    def complete(self) -> None:
        """Finish the copy; on any thread."""
        try:
            self.image.allocate()  # also of a rank that has no tensor to write
            if self._is_on_host:
                self.image.fill(self._remaining)
            elif self._remaining:
                with self._module.stream(self._stream):
                    self.image.fill(self._remaining)
                    self._copied = self._stream.record_event()
        finally:
            self._remaining = {}
            self._done.set()
        if self._copied is not None:
            self._copied.synchronize()

    def before_update(self) -> float:
        """Wait, on the main thread, until an update may change the tensors that `begin` received; return seconds."""
        began = time.perf_counter()
        self._done.wait()
        if self._copied is not None:
            self._module.current_stream(self._device).wait_event(self._copied)
        return time.perf_counter() - began


def page_locked(size: int) -> Tensor:
    """Return memory of the host that an accelerator copies to by itself."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _sources(
    layout: FileLayout, tensors: Mapping[str, Any], changing: Collection[str]
) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Return what is copied, by index in the layout: what a forward may change, and the rest.

    Makes no object for a tensor that is copied whole, so that saves start no garbage collections.
    """
    now: dict[int, Tensor] = {}
    later: dict[int, Tensor] = {}
    for index, item in enumerate(layout.items):
        tensor = tensors[item.name]
        source = live_part(tensor)
        of_time = now if item.name in changing else later
        of_time[index] = source if source.shape == item.box.sizes else shard_view(tensor, item.box)
    return now, later
