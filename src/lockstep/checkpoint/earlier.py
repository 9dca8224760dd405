"""Manifests of format version 1, which list every part of every tensor: they stay readable.

    tensors    model.layers.0.weight --> float32 [256, 64], in parts: file, offset, box, a hash for each 16 MiB

Parts that overlap, lie outside their file, or don't make up their tensor are refused before a byte is allocated for
them.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Annotated, Literal

from pydantic import FailFast

from lockstep.checkpoint import hashing
from lockstep.checkpoint.manifest import (
    ELEMENT_BYTES,
    FORMAT_VERSION,
    CheckpointRecord,
    Count,
    Dims,
    FileName,
    FromList,
    Hash,
    Manifest,
    Name,
    Record,
    StopAtFirst,
    TensorEntry,
    corrupt,
)
from lockstep.distributed.shard_boxes import Box, TensorInfo


class PartEntry(Record):
    """A box of a tensor, contiguous in one file.

    Attributes:
        at: First byte in the file.
        blocks: Hashes of its bytes, block by block.
    """

    file: FileName
    at: Count
    offsets: Dims
    sizes: Dims
    blocks: Annotated[tuple[Hash, ...], FromList, FailFast()]

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.sizes)


class _Tensor(Record):
    """A tensor and the parts that make it up."""

    dtype: Literal[tuple(ELEMENT_BYTES)]  # type: ignore[valid-type]
    shape: Dims
    parts: Annotated[tuple[Annotated[PartEntry, StopAtFirst], ...], FromList]


class EarlierManifest(CheckpointRecord):
    """The contents of a checkpoint, as version 1 wrote them."""

    format_version: Literal[1]
    tensors: dict[Annotated[Name, StopAtFirst], Annotated[_Tensor, StopAtFirst]]


def converted(earlier: EarlierManifest) -> Manifest:
    """Return the manifest in today's form, with the parts of each tensor instead of grids.

    Raises:
        CorruptCheckpoint: The parts don't make up the tensors, or a byte of a file belongs to none or to two.
    """
    _check_parts(earlier)
    fields = {name: getattr(earlier, name) for name in type(earlier).model_fields}
    tensors = {
        name: TensorEntry.model_construct(dtype=entry.dtype, shape=entry.shape, grid=0)
        for name, entry in earlier.tensors.items()
    }
    manifest = Manifest.model_construct(**{**fields, "format_version": FORMAT_VERSION, "tensors": tensors, "grids": ()})
    manifest._parts = {name: entry.parts for name, entry in earlier.tensors.items()}
    return manifest


def _check_parts(manifest: EarlierManifest) -> None:
    """Raise CorruptCheckpoint unless parts make up their tensors, and each byte of a file belongs to one part."""
    ranges: dict[str, list[tuple[int, int]]] = {name: [(0, file.header)] for name, file in manifest.files.items()}
    for name, entry in manifest.tensors.items():
        info = TensorInfo(entry.dtype, entry.shape)
        if not entry.parts:
            raise corrupt(f"{name} has no parts")
        for part in entry.parts:
            size = prod(part.sizes) * ELEMENT_BYTES[entry.dtype]
            if part.file not in manifest.files or part.at + size > manifest.files[part.file].size:
                raise corrupt(f"{name} lies outside of its file {part.file}")
            if len(part.offsets) != len(entry.shape) or len(part.sizes) != len(entry.shape):
                raise corrupt(f"a part of {name} has other dims than {info}")
            if len(part.blocks) != -(-size // hashing.BLOCK_BYTES):
                raise corrupt(f"{name} has {len(part.blocks)} hashes for {size:,} bytes")
            ranges[part.file].append((part.at, part.at + size))
        if not _is_covered(info, [part.box for part in entry.parts]):
            raise corrupt(f"{name}: its parts don't make up the whole of {info}")
    for file, used in ranges.items():
        _check_every_byte_is_used(file, manifest.files[file].size, used)


def _check_every_byte_is_used(file: str, size: int, ranges: list[tuple[int, int]]) -> None:
    """Raise CorruptCheckpoint unless the ranges follow each other without gap or overlap: then every byte is hashed."""
    end = 0
    for start, stop in sorted(ranges):
        if start != end:
            raise corrupt(
                f"bytes {min(end, start):,} to {max(end, start):,} of {file} belong to two tensors or to none"
            )
        end = stop
    if end != size:
        raise corrupt(f"{file} has {size:,} bytes, of which {end:,} are accounted for")


def _is_covered(info: TensorInfo, boxes: Sequence[Box]) -> bool:
    """Return whether the boxes cover a tensor without overlap."""
    inside = all(
        offset + size <= length
        for box in boxes
        for offset, size, length in zip(box.offsets, box.sizes, info.shape, strict=True)
    )
    return inside and sum(box.elements for box in boxes) == info.whole.elements and not _overlap(boxes)


def _overlap(parts: Sequence[Box]) -> bool:
    """Return whether two boxes overlap, by a sweep along the dim that is split most: near linear in the boxes."""
    boxes = [box for box in parts if box.elements]
    if len(boxes) < 2 or not boxes[0].sizes:
        return len(boxes) > 1
    dim = max(range(len(boxes[0].sizes)), key=lambda dim: len({box.offsets[dim] for box in boxes}))
    boxes.sort(key=lambda box: box.offsets[dim])
    for index, box in enumerate(boxes):
        end = box.offsets[dim] + box.sizes[dim]
        for other in boxes[index + 1 :]:
            if other.offsets[dim] >= end:
                break
            if box.meets(other) is not None:
                return True
    return False
