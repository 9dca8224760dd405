"""Bytes of a checkpoint, each verified while it is read, into memory that nobody uses yet.

    wanted: a box of a tensor --> the saved parts that meet it --> their blocks, hashed --> the overlap, copied

A part's rows lie one after the other, so rows that are not wanted are not read, but for the rest of their block: a hash
is of a whole block.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any, cast

from lockstep.checkpoint import manifest as manifests
from lockstep.checkpoint.fingerprints import BLOCK, Binding
from lockstep.checkpoint.manifest import ELEMENT_BYTES, CorruptCheckpoint, Manifest, Part
from lockstep.checkpoint.ownership import refuse_foreign
from lockstep.checkpoint.storage import MANIFEST, names_by_step, read_whole
from lockstep.distributed.shard_boxes import Box

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.checkpoint.storage import Storage, StoredFile

_THREADS = 4  # hashing and reading leave the interpreter alone


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
    """Not yet checked. Raises CorruptCheckpoint if they can't be read."""
    try:
        source = storage.open(name, MANIFEST)
        try:
            return read_whole(source, manifests.MOST_BYTES)
        finally:
            source.close()
    except OSError as error:
        raise CorruptCheckpoint(MANIFEST, _reason(error)) from None


@dataclass(frozen=True, slots=True)
class ReadItem:
    """A box of a saved tensor, and where it goes.

    Attributes:
        into: a contiguous tensor on the CPU, of the box's sizes and the saved dtype.
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
        self._sources: dict[str, StoredFile] = {}

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        for source in self._sources.values():
            with suppress(OSError):
                source.close()

    def read(self, wanted: Iterable[ReadItem]) -> None:
        """Fills what is wanted. Raises CorruptCheckpoint at the first fault, and then nothing of it may be used."""
        jobs: list[tuple[ReadItem, Part]] = []
        for one in wanted:
            for part in self._manifest.tensors[one.name].parts:
                if part.box.elements and part.box.meets(one.box) is not None:
                    jobs.append((one, part))
        for file in sorted({part.file for _, part in jobs}):
            self._open(file)
        with ThreadPoolExecutor(_THREADS, thread_name_prefix="checkpoint") as pool:
            for _ in pool.map(lambda job: self._read_part(*job), jobs):
                pass

    def verify(self) -> None:
        """Every byte of every file, in constant memory. Raises CorruptCheckpoint."""
        for file in sorted(self._manifest.files):
            self._open(file)
        scratch = memoryview(bytearray(BLOCK))
        for name, entry in self._manifest.tensors.items():
            for part in entry.parts:
                size = prod(part.sizes) * ELEMENT_BYTES[entry.dtype]
                for index in range(len(part.blocks)):
                    self._read_block(name, part, size, index, scratch)

    def _open(self, file: str) -> None:
        """Its size and header are what was written."""
        if file in self._sources:
            return
        entry = self._manifest.files[file]
        try:
            source = self._sources[file] = self._storage.open(self._name, file)
            if source.size != entry.size:
                raise CorruptCheckpoint(file, f"has {source.size:,} bytes, and had {entry.size:,} when it was written")
            header = memoryview(bytearray(entry.header))
            source.read(0, header)
        except OSError as error:
            raise CorruptCheckpoint(file, _reason(error)) from None
        if self._binding(file).block("", 0, header) != entry.header_hash:
            raise CorruptCheckpoint(file, f"its header (bytes 0 to {entry.header:,}) is not what was written")

    def _read_part(self, one: ReadItem, part: Part) -> None:
        overlap = part.box.meets(one.box)
        assert overlap is not None, "only parts that meet what is wanted are read"
        entry = self._manifest.tensors[one.name]
        element = ELEMENT_BYTES[entry.dtype]
        size = prod(part.sizes) * element
        if overlap == part.box == one.box:
            self._read_blocks(one.name, part, size, 0, len(part.blocks), _bytes(one.into))
            return
        first, stop = _rows(overlap, part, element)
        blocks = first // BLOCK, -(-stop // BLOCK)
        start = blocks[0] * BLOCK
        memory = bytearray(min(blocks[1] * BLOCK, size) - start)
        self._read_blocks(one.name, part, size, *blocks, memoryview(memory))
        _copy_overlap(memory, first - start, stop - start, overlap, part, one)

    def _read_blocks(self, name: str, part: Part, size: int, first: int, last: int, into: memoryview) -> None:
        for index in range(first, last):
            self._read_block(name, part, size, index, into[(index - first) * BLOCK :])

    def _read_block(self, name: str, part: Part, size: int, index: int, into: memoryview) -> None:
        start = index * BLOCK
        data = into[: min(BLOCK, size - start)]
        try:
            self._sources[part.file].read(part.at + start, data)
        except OSError as error:
            raise CorruptCheckpoint(part.file, _reason(error)) from None
        if self._binding(part.file).block(name, start, data) != part.blocks[index]:
            at = part.at + start
            raise CorruptCheckpoint(
                part.file, f"bytes {at:,} to {at + len(data):,}, of {name}, are not what was written"
            )

    def _binding(self, file: str) -> Binding:
        return Binding(self._manifest.run, self._manifest.step, file)


def _rows(overlap: Box, part: Part, element: int) -> tuple[int, int]:
    """The bytes of a part that hold the overlap's rows: whole ones, along the first dim."""
    row = prod(part.sizes[1:]) * element
    first = overlap.offsets[0] - part.offsets[0]
    return first * row, (first + overlap.sizes[0]) * row


def _copy_overlap(memory: bytearray, start: int, stop: int, overlap: Box, part: Part, one: ReadItem) -> None:
    import torch

    rows = torch.frombuffer(memory, dtype=torch.uint8)[start:stop].clone().view(one.into.dtype)
    there = Box((overlap.offsets[0], *part.offsets[1:]), (overlap.sizes[0], *part.sizes[1:]))
    one.into[overlap.within(one.box)] = rows.view(there.sizes)[overlap.within(there)]


def _bytes(tensor: Tensor) -> memoryview:
    import torch

    return memoryview(cast("Any", tensor.reshape(-1).view(torch.uint8).numpy()))


def _reason(error: OSError) -> str:
    return error.strerror or str(error)
