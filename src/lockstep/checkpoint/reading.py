"""Reads the bytes of a checkpoint, each verified, into memory that nothing uses yet.

    read item: a box of a tensor --> the saved parts that meet it --> their blocks, hashed --> the overlap, copied

A part's rows are contiguous, so rows that are not needed are not read, except for the rest of their block: a hash
covers a whole block.
"""

from __future__ import annotations

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
from lockstep.checkpoint.ownership import refuse_foreign
from lockstep.checkpoint.storage import MANIFEST, names_by_step, read_small
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
    """Return the manifest that `data` holds. Raises CorruptCheckpoint, as `read_manifest`."""
    manifest = manifests.from_bytes(data)
    refuse_foreign(manifest, storage.run)
    if any(step != manifest.step for step in names_by_step([name])):
        raise CorruptCheckpoint(MANIFEST, f"is that of step {manifest.step}")
    return manifest


def manifest_bytes(storage: ReadableStorage, name: str) -> bytes:
    """Return the manifest as stored, not yet checked. Raises CorruptCheckpoint if it can't be read."""
    try:
        return read_small(storage.open(name, MANIFEST), manifests.MAX_BYTES)
    except OSError as error:
        raise CorruptCheckpoint(MANIFEST, error.strerror or str(error)) from None


@dataclass(frozen=True, slots=True)
class ReadItem:
    """A box of a saved tensor, and the memory that it is read into.

    Attributes:
        into: A contiguous tensor on the CPU, of the box's sizes and the saved dtype.
    """

    name: str
    box: Box
    into: Tensor


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    file: str
    box: Box
    stored: StoredPart


class Reader:
    """Reads one checkpoint, file by file.

    Args:
        keeps_tables: Whether to remember what each file holds, for many calls of `read`; each file is parsed once then.
    """

    def __init__(self, storage: ReadableStorage, name: str, manifest: Manifest, *, keeps_tables: bool = False) -> None:
        self._storage = storage
        self._name = name
        self._manifest = manifest
        self._file: StoredFile | None = None
        self._table: FileTable | None = None
        self._tables: dict[str, FileTable] = {}
        self._keeps_tables = keeps_tables

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
                with self._opened(file):
                    jobs = [(item, self._part(item.name, file, box)) for item, box in wanted.pop(file)]
                    jobs.sort(key=lambda job: job[1].stored.at)
                    for _ in each(self._read_part, *zip(*jobs, strict=True)):
                        pass

    def verify(self) -> None:
        """Read and verify every byte of every file, in constant memory. Raises CorruptCheckpoint."""
        scratch = memoryview(bytearray(hashing.BLOCK_BYTES))
        for rank in range(self._manifest.ranks):
            file = shard_file(rank)
            with self._opened(file) as table:
                num_parts = 0
                boxes = (
                    (name, box)
                    for name, entry in self._manifest.tensors.items()
                    for box in self._manifest.grid_of(name).boxes_of(rank, entry.shape)
                )
                for name, box in boxes:
                    num_parts += 1
                    part = self._part(name, file, box)
                    for start in range(0, part.stored.size, hashing.BLOCK_BYTES):
                        self._read_blocks(part, start, scratch[: part.stored.size - start])
                if num_parts != len(table):
                    reason = f"it has {len(table):,} parts, of which the manifest has {num_parts:,}"
                    raise CorruptCheckpoint(file, reason)

    def _part(self, name: str, file: str, box: Box) -> _Part:
        assert self._table is not None, "the file is open"
        return _Part(name, file, box, self._table.part(name, self._manifest.tensors[name].info, box))

    @contextmanager
    def _opened(self, name: str) -> Iterator[FileTable]:
        """Open a file while the block runs, one at a time: there may be thousands. Check its size and header."""
        entry = self._manifest.files[name]
        try:
            file = self._storage.open(self._name, name)
        except OSError as error:
            raise CorruptCheckpoint(name, error.strerror or str(error)) from None
        try:
            self._file = file
            self._table = self._tables.get(name) or self._checked_table(name, entry)
            if self._keeps_tables:
                self._tables[name] = self._table
            yield self._table
        finally:
            with suppress(OSError):
                file.close()

    def _checked_table(self, name: str, entry: FileEntry) -> FileTable:
        assert self._file is not None, "the file is open"
        if self._file.size != entry.size:
            raise CorruptCheckpoint(name, f"has {self._file.size:,} bytes, and had {entry.size:,} when it was written")
        header = memoryview(bytearray(min(entry.header, entry.size)))
        self._fill(name, 0, header)
        if self._hasher(name).hash_block("", 0, header) != entry.header_hash:
            raise CorruptCheckpoint(name, f"its header (bytes 0 to {entry.header:,}) is not what was written")
        return FileTable(name, header, entry.size)

    def _read_part(self, item: ReadItem, part: _Part) -> None:
        if part.box == item.box:
            self._read_blocks(part, 0, _bytes(item.into))
            return
        overlap = part.box.meets(item.box)
        assert overlap is not None, "only parts that an item needs are read"
        block = hashing.BLOCK_BYTES
        row = prod(part.box.sizes[1:]) * item.into.element_size()
        first = (overlap.offsets[0] - part.box.offsets[0]) * row
        stop = first + overlap.sizes[0] * row
        start = first // block * block
        memory = bytearray(min(-(-stop // block) * block, part.stored.size) - start)
        self._read_blocks(part, start, memoryview(memory))
        _copy_overlap(memoryview(memory)[first - start : stop - start], overlap, part, item)

    def _read_blocks(self, part: _Part, first: int, into: memoryview) -> None:
        """Read the blocks of a part that begin at its byte `first`. Raises CorruptCheckpoint if one was changed."""
        for offset in range(0, len(into), hashing.BLOCK_BYTES):
            start, data = first + offset, into[offset : offset + hashing.BLOCK_BYTES]
            at = part.stored.at + start
            self._fill(part.file, at, data)
            digest = self._hasher(part.file).hash_block(part.name, start, data)
            if digest != part.stored.hash_of(start // hashing.BLOCK_BYTES):
                reason = f"bytes {at:,} to {at + len(data):,}, of {part.name}, are not what was written"
                raise CorruptCheckpoint(part.file, reason)

    def _fill(self, file: str, at: int, data: memoryview) -> None:
        assert self._file is not None, "the file is open"
        try:
            self._file.read(at, data)
        except OSError as error:
            raise CorruptCheckpoint(file, error.strerror or str(error)) from None

    def _hasher(self, file: str) -> BlockHasher:
        return BlockHasher(self._manifest.run, self._manifest.step, file)


def is_intact(storage: ReadableStorage, name: str) -> bool:
    """Return whether every byte of a checkpoint is what was written."""
    try:
        Reader(storage, name, read_manifest(storage, name)).verify()
    except CorruptCheckpoint:
        return False
    return True


@contextmanager
def _map_for(size: int) -> Iterator[Callable[..., Iterator[None]]]:
    """Yield the `map` that reads this many bytes: by threads, or by this one."""
    if size <= _FEW_BYTES:
        yield map
        return
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="checkpoint") as pool:
        yield pool.map


def _copy_overlap(rows: memoryview, overlap: Box, part: _Part, item: ReadItem) -> None:
    """Copy an overlap from the rows of a part that have it, whatever the other dims of the part."""
    import torch

    saved = torch.frombuffer(rows, dtype=torch.uint8).clone().view(item.into.dtype)
    offsets = (overlap.offsets[0], *part.box.offsets[1:])
    box = Box(offsets, (overlap.sizes[0], *part.box.sizes[1:]))
    item.into[overlap.within(item.box)] = saved.view(box.sizes)[overlap.within(box)]


def _bytes(tensor: Tensor) -> memoryview:
    import torch

    return memoryview(cast("Any", tensor.reshape(-1).view(torch.uint8).numpy()))
