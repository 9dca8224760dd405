"""A copy of the training state, made while the next forward and backward run.

update k | forward, backward of k + 1            | update k + 1
         |  buffers   copied before the forward  |
         |  parameters, moments: copied meanwhile|  waits until they are

The next save reuses its memory: allocating it takes ten times as long as the copy.
"""

from __future__ import annotations

import mmap
import tempfile
import threading
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, cast

import torch

from lockstep.checkpoint.file_image import FileImage
from lockstep.distributed.shard_boxes import live_part, shard_view
from lockstep.distributed.swapped_shard import SwappedShard

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from lockstep.checkpoint.file_image import Copy, Source
    from lockstep.checkpoint.file_layout import FileLayout

CHUNK_BYTES = 2**26  # of page-locked memory


class HostSnapshot:
    """A snapshot of a rank's part of the state, on the CPU or in files.

    Args:
        folder: Where its memory is a file, since the state is in files too; None: in memory.

    Attributes:
        image: The bytes of the rank's file, complete from `complete` until the next `begin`.
    """

    def __init__(self, layout: FileLayout, folder: Path | None = None) -> None:
        self.layout = layout
        self.image = FileImage(layout, layout.size, _pageable if folder is None else partial(_mapped, folder))
        self.image.allocate()
        self._remaining: dict[int, Source] = {}
        self._done = threading.Event()
        self._done.set()

    def begin(self, tensors: Mapping[str, Tensor], changing: Collection[str]) -> None:
        """Begin the copy, on the main thread, between two updates. `changing`: names of what a forward may change."""
        now, self._remaining = _sources(self.layout, tensors, changing)
        self._done.clear()
        copy(self.image.copies(now))

    def complete(self) -> None:
        """Finish the copy; on any thread."""
        try:
            copy(self.image.copies(self._remaining))
        finally:
            self._remaining = {}
            self._done.set()

    def before_update(self) -> None:
        """Wait, on the main thread, until an update may change the tensors that `begin` received."""
        self._done.wait()


class DeviceSnapshot:
    """The same for tensors on an accelerator, copied to page-locked memory on a separate stream.

    An update's kernels wait for the copy. The host only waits for `complete`, which makes the first copy, since it
    allocates the memory, and always those of tensors on the host (offloaded).
    """

    def __init__(self, layout: FileLayout, device: torch.device) -> None:
        self.layout = layout
        self.image = FileImage(layout, CHUNK_BYTES, page_locked)
        self._device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device)
        self._remaining: dict[int, Source] = {}
        self._started = threading.Event()
        self._started.set()
        self._copied: torch.Event | None = None

    def begin(self, tensors: Mapping[str, Tensor], changing: Collection[str]) -> None:
        now, later = _sources(self.layout, tensors, changing)
        current = self._module.current_stream(self._device)
        self._stream.wait_stream(current)
        with self._module.stream(self._stream):
            if self.image.is_allocated:
                copy(self.image.copies(now))
                current.wait_event(self._stream.record_event())
                self._remaining = {index: source for index, source in later.items() if _is_on_host(source)}
                copy(self.image.copies({index: later[index] for index in later.keys() - self._remaining.keys()}))
            else:
                self._remaining = {**{index: source.clone() for index, source in now.items()}, **later}
                current.wait_event(self._stream.record_event())
            self._copied = self._stream.record_event()
        if self._remaining:
            self._started.clear()

    def complete(self) -> None:
        try:
            self.image.allocate()  # also of a rank that has no tensor to write
            if self._remaining:
                with self._module.stream(self._stream):
                    copy(self.image.copies(self._remaining))
                    self._copied = self._stream.record_event()
        finally:
            self._remaining = {}
            self._started.set()
        assert self._copied is not None, "a snapshot is begun before it is completed"
        self._copied.synchronize()

    def before_update(self) -> None:
        self._started.wait()
        if self._copied is not None:
            self._module.current_stream(self._device).wait_event(self._copied)


Snapshot: TypeAlias = HostSnapshot | DeviceSnapshot


def snapshot_of(tensors: Mapping[str, Any], device: torch.device, layout: FileLayout) -> Snapshot:
    """Return the memory for snapshots of a state on a device."""
    folder = next((tensor.file.parent for tensor in tensors.values() if isinstance(tensor, SwappedShard)), None)
    is_on_host = device.type == "cpu" or folder is not None
    return HostSnapshot(layout, folder) if is_on_host else DeviceSnapshot(layout, device)


def page_locked(size: int) -> Tensor:
    """Return memory of the host that an accelerator copies to by itself."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)


def _pageable(size: int) -> Tensor:
    return torch.empty(size, dtype=torch.uint8)


def _mapped(folder: Path, size: int) -> Tensor:
    """Return memory that the system may write to a disk; the file has no name, and ends with the process."""
    with tempfile.TemporaryFile(dir=folder) as file:
        file.truncate(size)
        return torch.frombuffer(mmap.mmap(file.fileno(), size), dtype=torch.uint8)


def _sources(
    layout: FileLayout, tensors: Mapping[str, Any], changing: Collection[str]
) -> tuple[dict[int, Tensor], dict[int, Source]]:
    """Return what is copied, by index in the layout: what a forward may change, and the rest.

    Makes no object for a tensor that is copied whole, so that saves start no garbage collections.
    """
    now: dict[int, Tensor] = {}
    later: dict[int, Source] = {}
    for index, item in enumerate(layout.items):
        tensor = tensors[item.name]
        if isinstance(tensor, SwappedShard):
            later[index] = partial(shard_view, cast("Any", tensor), item.box)
            continue
        source = live_part(tensor)
        whole = source if source.shape == item.box.sizes else shard_view(tensor, item.box)
        if item.name in changing:
            now[index] = whole
        else:
            later[index] = whole
    return now, later


def _is_on_host(source: Source) -> bool:
    return not isinstance(source, torch.Tensor) or source.device.type == "cpu"


@torch.no_grad()
def copy(copies: Iterable[Copy]) -> None:
    """Copy to an image, without waiting for an accelerator."""
    targets, sources = [], []
    for target, source, where in copies:
        if isinstance(source, torch.Tensor):
            targets.append(target)
            sources.append(source if where is None else source[where])
        else:
            target.copy_(source()[() if where is None else where])
    if targets:
        torch._foreach_copy_(targets, sources, non_blocking=True)
