"""The records of what each rank has written into a checkpoint, and the manifest that follows from them.

rank 0   rank-00000.safetensors
rank 1   rank-00001.safetensors, rank-00001.json: its record --> manifest.json, and the records are removed
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING

from lockstep.checkpoint import hashing, manifest
from lockstep.checkpoint.hashing import BlockHasher
from lockstep.checkpoint.manifest import FileEntry, GridEntry, Manifest, TensorEntry, shard_file
from lockstep.core.errors import RunFailed

if TYPE_CHECKING:
    from lockstep.checkpoint.file_image import FileImage
    from lockstep.checkpoint.file_layout import FileLayout
    from lockstep.checkpoint.saving import RunMetadata, StepMetadata
    from lockstep.checkpoint.storage import Draft
    from lockstep.checkpoint.write_plan import WritePlan


def write_rank_file(draft: Draft, layout: FileLayout, image: FileImage, hasher: BlockHasher) -> FileEntry:
    """Write a rank's file with the hashes of all its blocks in the header; return its record. Raises OSError."""
    hashes = "".join(
        hasher.hash_block(item.name, at - start, *image.pieces(at, min(at + hashing.BLOCK_BYTES, end)))
        for item, start, end in layout.spans()
        for at in range(start, end, hashing.BLOCK_BYTES)
    )
    image.write(layout.hashes_at, hashes.encode())
    header = len(layout.header)
    record = FileEntry(size=layout.size, header=header, header_hash=hasher.hash_block("", 0, *image.pieces(0, header)))
    draft.write(layout.file, *image.pieces())
    return record


def write_record(draft: Draft, rank: int, record: FileEntry) -> None:
    """Write a rank's record, after its file. Raises OSError."""
    text = record.model_dump_json().encode()
    draft.write(_record_file(rank), memoryview(hashing.hash_bytes(text).encode() + b"\n" + text))


def taken_record(draft: Draft, rank: int) -> FileEntry:
    """Return a rank's record, and remove it. Raises OSError, or RunFailed if the storage has changed it."""
    record = read_record(draft, rank)
    draft.remove(_record_file(rank))
    return record


def read_record(draft: Draft, rank: int) -> FileEntry:
    """Return a rank's record. Raises OSError, or RunFailed if it isn't what the rank has written."""
    file = _record_file(rank)
    checksum, _, text = draft.read(file).partition(b"\n")
    if hashing.hash_bytes(text).encode() != checksum:
        raise RunFailed(f"{file} is not what its rank has written: the storage corrupts data")
    return FileEntry.model_validate_json(text)


def manifest_of(
    run_metadata: RunMetadata, metadata: StepMetadata, records: Mapping[int, FileEntry], plan: WritePlan, ranks: int
) -> Manifest:
    """Return the manifest of what ranks have written, given their records by rank.

    Args:
        ranks: Number of all ranks.
    """
    index_of, grids = plan.grids()
    return Manifest(
        format_version=2,
        run=run_metadata.run,
        step=metadata.step,
        samples=metadata.samples,
        tokens=metadata.tokens,
        ranks=ranks,
        written=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        files={shard_file(rank): record for rank, record in records.items()},
        grids=tuple(GridEntry.model_construct(cuts=grid.cuts, ranks=grid.ranks) for grid in grids),
        tensors={
            name: TensorEntry.model_construct(dtype=info.dtype, shape=info.shape, grid=index_of[name])
            for name, info in plan.infos.items()
        },
        state=dict(metadata.state),
        metrics=dict(metadata.metrics),
        config=dict(run_metadata.config),
        environment={**run_metadata.environment, **metadata.environment},
    )


def encoded(made: Manifest) -> bytes:
    """Return a manifest as it is stored. Raises RunFailed, or CorruptCheckpoint, if it could not be read again."""
    data = manifest.to_bytes(made)
    if len(data) > manifest.MAX_BYTES:
        raise RunFailed(
            f"its manifest would have {len(data):,} bytes, and none over {manifest.MAX_BYTES:,} can be read again"
        )
    manifest.from_bytes(data)
    return data


def _record_file(rank: int) -> str:
    return f"rank-{rank:05d}.json"
