"""Reads the bytes of a checkpoint, each verified, into memory that nothing uses yet.

    read item: a box of a tensor --> the saved parts that meet it --> their blocks, hashed --> the overlap, copied

A part's rows are contiguous, so rows that are not needed are not read, except for the rest of their block: a hash
covers a whole block.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, cast

from lockstep.checkpoint import hashing
from lockstep.checkpoint import manifest as manifests
from lockstep.checkpoint.hashing import BlockHasher
from lockstep.checkpoint.manifest import ELEMENT_BYTES, CorruptCheckpoint, Manifest, PartEntry
from lockstep.checkpoint.ownership import refuse_foreign
from lockstep.checkpoint.storage import MANIFEST, names_by_step, read_small
from lockstep.distributed.shard_boxes import Box

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.checkpoint.storage import Storage, StoredFile

_THREADS = 4  # hashing and reading release the interpreter lock


def read_manifest(storage: Storage, name: str) -> Manifest:
    """Return a checkpoint's manifest. Raises CorruptCheckpoint, also if it is another run's or another step's."""
    return checked_manifest(storage, name, manifest_bytes(storage, name))


def checked_manifest(storage: Storage, name: str, data: bytes) -> Manifest:
    """Return the manifest that `data` holds. Raises CorruptCheckpoint, as `read_manifest`."""
    manifest = manifests.from_bytes(data)
    refuse_foreign(manifest, storage.run)
    if any(step != manifest.step for step in names_by_step([name])):
        raise CorruptCheckpoint(MANIFEST, f"is that of step {manifest.step}")
    return manifest


def manifest_bytes(storage: Storage, name: str) -> bytes:
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


class Reader:
    """Reads one checkpoint. Use as a context manager: it holds files open."""

    def __init__(self, storage: Storage, name: str, manifest: Manifest) -> None:
        self._storage = storage
        self._name = name
        self._manifest = manifest
        self._files: dict[str, StoredFile] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            with suppress(OSError):
                file.close()

    def read(self, items: Iterable[ReadItem]) -> None:
        """Fill the items' memory. Raises CorruptCheckpoint at the first fault; none of the memory may be used then."""
        jobs = [
            (item, part, overlap)
            for item in items
            for part in self._manifest.tensors[item.name].parts
            if part.box.elements and (overlap := part.box.meets(item.box)) is not None
        ]
        for file in sorted({part.file for _, part, _ in jobs}):
            self._open(file)
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="checkpoint") as pool:
            for _ in pool.map(lambda job: self._read_overlap(*job), jobs):
                pass

    def verify(self) -> None:
        """Read and verify every byte of every file, in constant memory. Raises CorruptCheckpoint."""
        for file in sorted(self._manifest.files):
            self._open(file)
        scratch = memoryview(bytearray(hashing.BLOCK_BYTES))
        for name, entry in self._manifest.tensors.items():
            for part in entry.parts:
                size = prod(part.sizes) * ELEMENT_BYTES[entry.dtype]
                for start in range(0, size, hashing.BLOCK_BYTES):
                    self._read_block(name, part, start, scratch[: size - start])

    def _open(self, name: str) -> None:
        """Open a file and check its size and header."""
        if name in self._files:
            return
        entry = self._manifest.files[name]
        try:
            file = self._files[name] = self._storage.open(self._name, name)
            if file.size != entry.size:
                raise CorruptCheckpoint(name, f"has {file.size:,} bytes, and had {entry.size:,} when it was written")
            header = memoryview(bytearray(entry.header))
            file.read(0, header)
        except OSError as error:
            raise CorruptCheckpoint(name, error.strerror or str(error)) from None
        if self._hasher(name).hash_block("", 0, header) != entry.header_hash:
            raise CorruptCheckpoint(name, f"its header (bytes 0 to {entry.header:,}) is not what was written")

    def _read_overlap(self, item: ReadItem, part: PartEntry, overlap: Box) -> None:
        if overlap == part.box == item.box:
            self._read_blocks(item.name, part, 0, _bytes(item.into))
            return
        block = hashing.BLOCK_BYTES
        row = prod(part.sizes[1:]) * item.into.element_size()
        first = (overlap.offsets[0] - part.offsets[0]) * row
        stop = first + overlap.sizes[0] * row
        start = first // block * block
        memory = bytearray(min(-(-stop // block) * block, part.sizes[0] * row) - start)
        self._read_blocks(item.name, part, start, memoryview(memory))
        _copy_overlap(memoryview(memory)[first - start : stop - start], overlap, part, item)

    def _read_blocks(self, name: str, part: PartEntry, start: int, into: memoryview) -> None:
        for offset in range(0, len(into), hashing.BLOCK_BYTES):
            self._read_block(name, part, start + offset, into[offset:])

    def _read_block(self, name: str, part: PartEntry, start: int, into: memoryview) -> None:
        """Read the block of a part that begins at its byte `start` into the beginning of `into`."""
        data = into[: hashing.BLOCK_BYTES]
        first = part.at + start
        try:
            self._files[part.file].read(first, data)
        except OSError as error:
            raise CorruptCheckpoint(part.file, error.strerror or str(error)) from None
        if self._hasher(part.file).hash_block(name, start, data) != part.blocks[start // hashing.BLOCK_BYTES]:
            raise CorruptCheckpoint(
                part.file, f"bytes {first:,} to {first + len(data):,}, of {name}, are not what was written"
            )

    def _hasher(self, file: str) -> BlockHasher:
        return BlockHasher(self._manifest.run, self._manifest.step, file)


def _copy_overlap(rows: memoryview, overlap: Box, part: PartEntry, item: ReadItem) -> None:
    """Copy the overlap out of the part's whole rows that hold it."""
    import torch

    saved = torch.frombuffer(rows, dtype=torch.uint8).clone().view(item.into.dtype)
    box = Box((overlap.offsets[0], *part.offsets[1:]), (overlap.sizes[0], *part.sizes[1:]))
    item.into[overlap.within(item.box)] = saved.view(box.sizes)[overlap.within(box)]


def _bytes(tensor: Tensor) -> memoryview:
    import torch

    return memoryview(cast("Any", tensor.reshape(-1).view(torch.uint8).numpy()))
