"""A moment of the training state, copied while the next forward and backward go on.

    update k | forward, backward of k + 1            | update k + 1
             |  buffers   copied before the forward  |
             |  parameters, moments: copied meanwhile|  waits until they are

Parameters and optimizer state change in updates alone, so the copy has a whole forward and backward to hide in. The
memory it goes to is kept for the next save: new memory costs ten times as much as the copy itself.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from lockstep.distributed.shard_boxes import shard_view

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.checkpoint.shards import Layout


class Snapshot(Protocol):
    """A rank's share of the state, as the image of its file."""

    @property
    def layout(self) -> Layout: ...

    @property
    def image(self) -> memoryview:
        """The file's bytes: whole once `complete` has returned, until the next `begin`."""

    def begin(self, tensors: Mapping[str, Tensor], changing: Collection[str]) -> None:
        """On the main thread, between two updates. `changing`: what a forward may change."""

    def complete(self) -> None:
        """In whatever thread."""

    def before_update(self) -> None:
        """On the main thread, before an update changes what `begin` was given."""


class HostSnapshot:
    """Of tensors on the CPU."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        memory = torch.empty(layout.size, dtype=torch.uint8)
        self._copies = _views(memory, layout)
        self.image = _image(memory, layout)
        self._later: _Pairs = []
        self._done = threading.Event()
        self._done.set()

    def begin(self, tensors: Mapping[str, Tensor], changing: Collection[str]) -> None:
        now, self._later = _split(self.layout, self._copies, tensors, changing)
        self._done.clear()
        _copy(now)

    def complete(self) -> None:
        try:
            _copy(self._later)
        finally:
            self._later = []
            self._done.set()

    def before_update(self) -> None:
        self._done.wait()


class DeviceSnapshot:
    """Of tensors on a GPU, copied to page-locked memory by a stream of its own: an update's kernels wait for it, the
    host doesn't."""

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.layout = layout
        memory = torch.empty(layout.size, dtype=torch.uint8, pin_memory=True)
        self._copies = _views(memory, layout)
        self.image = _image(memory, layout)
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None

    def begin(self, tensors: Mapping[str, Tensor], changing: Collection[str]) -> None:
        now, later = _split(self.layout, self._copies, tensors, changing)
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            _copy(now)
            current.wait_event(self._stream.record_event())
            _copy(later)
            self._copied = self._stream.record_event()

    def complete(self) -> None:
        assert self._copied is not None, "a snapshot is begun before it is completed"
        self._copied.synchronize()

    def before_update(self) -> None:
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)


def snapshot_on(device: torch.device, layout: Layout) -> Snapshot:
    return DeviceSnapshot(layout, device) if device.type == "cuda" else HostSnapshot(layout)


_Pairs = list[tuple["Tensor", "Tensor"]]


def _split(
    layout: Layout, copies: Sequence[Tensor], tensors: Mapping[str, Tensor], changing: Collection[str]
) -> tuple[_Pairs, _Pairs]:
    """(Copy, source): those that a forward may change, and the others."""
    now: _Pairs = []
    later: _Pairs = []
    for place, copy in zip(layout.places, copies, strict=True):
        source = shard_view(tensors[place.piece.name], place.piece.box)
        (now if place.piece.name in changing else later).append((copy, source))
    return now, later


@torch.no_grad()
def _copy(pairs: _Pairs) -> None:
    if pairs:
        torch._foreach_copy_([copy for copy, _ in pairs], [source for _, source in pairs], non_blocking=True)


def _image(memory: Tensor, layout: Layout) -> memoryview:
    image = memoryview(cast("Any", memory.numpy()))
    image[: len(layout.header)] = layout.header
    return image


def _views(memory: Tensor, layout: Layout) -> list[Tensor]:
    """The file's tensors, as tensors on its memory."""
    return [
        memory[place.at : place.end].view(getattr(torch, place.piece.kind.dtype)).view(place.piece.box.sizes)
        for place in layout.places
    ]
