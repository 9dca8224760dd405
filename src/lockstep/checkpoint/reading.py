"""Reads the bytes of a checkpoint, each verified, into memory that nothing uses yet.

    read item: a box of a tensor --> the saved parts that meet it --> their blocks, hashed --> the overlap, copied

Of a part only the needed rows are read, and the rest of their blocks, since a hash covers a block.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, cast

from lockstep.checkpoint import hashing
from lockstep.checkpoint import manifest as manifests
from lockstep.checkpoint.file_layout import FileTable, StoredPart
from lockstep.checkpoint.hashing import BlockHasher
from lockstep.checkpoint.manifest import CorruptCheckpoint, FileEntry, Manifest, shard_file
from lockstep.checkpoint.storage import MANIFEST, SHORT_ID, names_by_step, read_small
from lockstep.distributed.shard_boxes import Box

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.checkpoint.storage import ReadableStorage, StoredFile

_THREADS = 4  # hashing and reading release the interpreter lock
_FEW_BYTES = 2**25  # are read before the threads would have started


def read_manifest(storage: ReadableStorage, name: str) -> Manifest:
    """Return a checkpoint's manifest. Raises CorruptCheckpoint, also if it is another run's or another step's."""
    return checked_manifest(storage, name, manifest_bytes(storage, name))


def checked_manifest(storage: ReadableStorage, name: str, data: bytes) -> Manifest:
    """Return the manifest that `data` holds. Raises CorruptCheckpoint, as `read_manifest` does."""
    manifest = manifests.from_bytes(data)
    if (run := storage.run) is not None and manifest.run != run:
        own, other = run[:SHORT_ID], manifest.run[:SHORT_ID]
        raise CorruptCheckpoint(MANIFEST, f"belongs to another run (id {other}); the checkpoints here are of run {own}")
    if any(step != manifest.step for step in names_by_step([name])):
        raise CorruptCheckpoint(MANIFEST, f"is of step {manifest.step}")
    return manifest


def manifest_bytes(storage: ReadableStorage, name: str) -> bytes:
    """Return the manifest as stored, not yet checked. Raises CorruptCheckpoint if it can't be read."""
    with _as_corrupt(MANIFEST):
        return read_small(storage.open(name, MANIFEST), manifests.MAX_BYTES)


@contextmanager
def _as_corrupt(file: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CorruptCheckpoint(file, error.strerror or str(error)) from None


@dataclass(frozen=True, slots=True)
class ReadItem:
    """A box of a saved tensor, and contiguous memory on the CPU, of its sizes and dtype, to read it into."""

    name: str
    box: Box
    into: Tensor


class Reader:
    """Reads one checkpoint, one file at a time: there may be thousands."""

    def __init__(self, storage: ReadableStorage, name: str, manifest: Manifest) -> None:
        self._storage = storage
        self._name = name
        self._manifest = manifest

    def read(self, items: Iterable[ReadItem]) -> None:
        """Fill the items' memory. Raises CorruptCheckpoint at the first fault; none of the memory may be used then."""
        wanted: dict[str, list[tuple[ReadItem, Box]]] = {}
        size = 0
        for item in items:
            size += item.into.nbytes
            grid, shape = self._manifest.grid_of(item.name), self._manifest.tensors[item.name].shape
            for rank, box in grid.meeting(item.box, shape):
                wanted.setdefault(shard_file(rank), []).append((item, box))
        with _map_for(size) as each:
            for file in sorted(wanted):
                with self._opened(file) as opened:
                    jobs = [(item, self._part(opened, item.name, box)) for item, box in wanted.pop(file)]
                    jobs.sort(key=lambda job: job[1].at)
                    for _ in each(opened.read_item, *zip(*jobs, strict=True)):
                        pass

    def tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return whole tensors, on the CPU. Raises CorruptCheckpoint."""
        import torch

        infos = {name: self._manifest.tensors[name].info for name in names}
        whole = {name: torch.empty(info.shape, dtype=getattr(torch, info.dtype)) for name, info in infos.items()}
        self.read(ReadItem(name, info.whole, whole[name]) for name, info in infos.items())
        return whole

    def verify(self) -> None:
        """Read and verify every byte of every file, in constant memory. Raises CorruptCheckpoint."""
        scratch = memoryview(bytearray(hashing.BLOCK_BYTES))
        for rank in range(self._manifest.ranks):
            with self._opened(shard_file(rank)) as opened:
                num_parts = 0
                for name, entry in self._manifest.tensors.items():
                    for box in self._manifest.grid_of(name).boxes_of(rank, entry.shape):
                        num_parts += 1
                        part = self._part(opened, name, box)
                        for start in range(0, part.size, hashing.BLOCK_BYTES):
                            opened.read_blocks(part, start, scratch[: part.size - start])
                if num_parts != len(opened.table):
                    reason = f"it has {len(opened.table):,} parts, and the manifest {num_parts:,}"
                    raise CorruptCheckpoint(opened.name, reason)

    def _part(self, opened: _OpenFile, name: str, box: Box) -> StoredPart:
        return opened.table.part(name, self._manifest.tensors[name].info, box)

    @contextmanager
    def _opened(self, name: str) -> Iterator[_OpenFile]:
        with _as_corrupt(name):
            file = self._storage.open(self._name, name)
        try:
            hasher = BlockHasher(self._manifest.run, self._manifest.step, name)
            yield _OpenFile(name, file, self._manifest.files[name], hasher)
        finally:
            with suppress(OSError):
                file.close()


class _OpenFile:
    """A file with the size and header that were written. Raises CorruptCheckpoint."""

    def __init__(self, name: str, file: StoredFile, entry: FileEntry, hasher: BlockHasher) -> None:
        self.name = name
        self._file = file
        self._hasher = hasher
        if file.size != entry.size:
            raise CorruptCheckpoint(name, f"has {file.size:,} bytes, and had {entry.size:,} when it was written")
        header = memoryview(bytearray(min(entry.header, entry.size)))
        self._fill(0, header)
        if hasher.hash_block("", 0, header) != entry.header_hash:
            raise CorruptCheckpoint(name, f"its header (bytes 0 to {entry.header:,}) is not what was written")
        self.table = FileTable(name, header, entry.size)

    def read_item(self, item: ReadItem, part: StoredPart) -> None:
        if part.box == item.box:
            self.read_blocks(part, 0, _bytes(item.into))
            return
        overlap = part.box.meets(item.box)
        assert overlap is not None, "only parts that an item needs are read"
        block = hashing.BLOCK_BYTES
        row = prod(part.box.sizes[1:]) * item.into.element_size()
        first = (overlap.offsets[0] - part.box.offsets[0]) * row
        stop = first + overlap.sizes[0] * row
        start = first // block * block
        memory = bytearray(min(-(-stop // block) * block, part.size) - start)
        self.read_blocks(part, start, memoryview(memory))
        _copy_overlap(memoryview(memory)[first - start : stop - start], overlap, part.box, item)

    def read_blocks(self, part: StoredPart, first: int, into: memoryview) -> None:
        """Read the blocks of a part that begin at its byte `first`. Raises CorruptCheckpoint if one was changed."""
        for offset in range(0, len(into), hashing.BLOCK_BYTES):
            start, data = first + offset, into[offset : offset + hashing.BLOCK_BYTES]
            at = part.at + start
            self._fill(at, data)
            if self._hasher.hash_block(part.name, start, data) != part.hash_of(start // hashing.BLOCK_BYTES):
                reason = f"bytes {at:,} to {at + len(data):,}, of {part.name}, are not what was written"
                raise CorruptCheckpoint(self.name, reason)

    def _fill(self, at: int, data: memoryview) -> None:
        with _as_corrupt(self.name):
            self._file.read(at, data)


@dataclass(frozen=True, slots=True)
class VerificationResult:
    """The result of reading every byte of a checkpoint or file; `fault` is None if all are what was written."""

    name: str
    size: int
    seconds: float
    fault: str | None


def verify(storage: ReadableStorage, name: str) -> VerificationResult:
    """Read and hash a checkpoint up to the first fault."""
    began, size = time.perf_counter(), 0
    fault: str | None = None
    try:
        manifest = read_manifest(storage, name)
        size = manifest.size
        Reader(storage, name, manifest).verify()
    except CorruptCheckpoint as error:
        fault = str(error)
    return VerificationResult(name, size, time.perf_counter() - began, fault)


@contextmanager
def _map_for(size: int) -> Iterator[Callable[..., Iterator[None]]]:
    if size <= _FEW_BYTES:
        yield map
        return
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="checkpoint") as pool:
        yield pool.map


def _copy_overlap(rows: memoryview, overlap: Box, saved: Box, item: ReadItem) -> None:
    import torch

    values = torch.frombuffer(rows, dtype=torch.uint8).clone().view(item.into.dtype)
    box = Box((overlap.offsets[0], *saved.offsets[1:]), (overlap.sizes[0], *saved.sizes[1:]))
    item.into[overlap.within(item.box)] = values.view(box.sizes)[overlap.within(box)]


def _bytes(tensor: Tensor) -> memoryview:
    import torch

    return memoryview(cast("Any", tensor.reshape(-1).view(torch.uint8).numpy()))
