"""A copy of the training state, made while the next forward and backward run.

    update k | forward, backward of k + 1            | update k + 1
             |  buffers   copied before the forward  |
             |  parameters, moments: copied meanwhile|  waits until they are

Parameters and optimizer state change in updates alone, so the copy has a whole forward and backward to hide in. Its
memory is reused by the next save: allocating it takes ten times as long as the copy.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch

from lockstep.distributed.shard_boxes import shard_view

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.checkpoint.file_layout import FileLayout


class HostSnapshot:
    """A snapshot of a rank's part of the state, on the CPU.

    Attributes:
        image: The bytes of the rank's file: complete once `complete` has returned, until the next `begin`.
    """

    def __init__(self, layout: FileLayout) -> None:
        self.layout = layout
        self.image, self._copies = _image(layout, pinned=False)
        self._remaining: _Pairs = []
        self._done = threading.Event()
        self._done.set()

    def begin(self, tensors: Mapping[str, Tensor], changing: Collection[str]) -> None:
        """Begin the copy, on the main thread, between two updates. `changing`: names of what a forward may change."""
        now, self._remaining = _split(self.layout, self._copies, tensors, changing)
        self._done.clear()
        _copy(now)

    def complete(self) -> None:
        """Finish the copy; on any thread."""
        try:
            _copy(self._remaining)
        finally:
            self._remaining = []
            self._done.set()

    def before_update(self) -> None:
        """Wait, on the main thread, until an update may change the tensors that `begin` received."""
        self._done.wait()


class DeviceSnapshot:
    """The same of tensors on a GPU, copied to page-locked memory on a stream of its own.

    An update's kernels wait for the copy; the host doesn't.
    """

    def __init__(self, layout: FileLayout, device: torch.device) -> None:
        self.layout = layout
        self.image, self._copies = _image(layout, pinned=True)
        self._device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device)
        self._copied: torch.Event | None = None

    def begin(self, tensors: Mapping[str, Tensor], changing: Collection[str]) -> None:
        now, later = _split(self.layout, self._copies, tensors, changing)
        current = self._module.current_stream(self._device)
        self._stream.wait_stream(current)
        with self._module.stream(self._stream):
            _copy(now)
            current.wait_event(self._stream.record_event())
            _copy(later)
            self._copied = self._stream.record_event()

    def complete(self) -> None:
        assert self._copied is not None, "a snapshot is begun before it is completed"
        self._copied.synchronize()

    def before_update(self) -> None:
        if self._copied is not None:
            self._module.current_stream(self._device).wait_event(self._copied)


Snapshot: TypeAlias = HostSnapshot | DeviceSnapshot


def snapshot_on(device: torch.device, layout: FileLayout) -> Snapshot:
    return HostSnapshot(layout) if device.type == "cpu" else DeviceSnapshot(layout, device)


_Pairs = list[tuple["Tensor", "Tensor"]]


def _split(
    layout: FileLayout, copies: Sequence[Tensor], tensors: Mapping[str, Tensor], changing: Collection[str]
) -> tuple[_Pairs, _Pairs]:
    """Return (copy, source) pairs: those that a forward may change, and the others."""
    now: _Pairs = []
    later: _Pairs = []
    for span, copy in zip(layout.items, copies, strict=True):
        source = shard_view(tensors[span.item.name], span.item.box)
        (now if span.item.name in changing else later).append((copy, source))
    return now, later


@torch.no_grad()
def _copy(pairs: _Pairs) -> None:
    if pairs:
        torch._foreach_copy_([copy for copy, _ in pairs], [source for _, source in pairs], non_blocking=True)


def _image(layout: FileLayout, *, pinned: bool) -> tuple[memoryview, list[Tensor]]:
    """Allocate the file's image, its header filled in, and return it with its tensors as views."""
    memory = torch.empty(layout.size, dtype=torch.uint8, pin_memory=pinned)
    image = memoryview(cast("Any", memory.numpy()))
    image[: len(layout.header)] = layout.header
    return image, [
        memory[span.start : span.end].view(getattr(torch, span.item.info.dtype)).view(span.item.box.sizes)
        for span in layout.items
    ]
