"""The manifest of a checkpoint: manifest.json, written last, with a hash of itself, validated before anything is read.

    {"manifest": {"format_version": 1, "run": ..., "step": 480, "files": ..., "tensors": ..., ...},
     "xxh3_128": "..."}

    tensors    model.layers.0.weight --> float32 [256, 64], in parts: file, offset, box, a hash for each 16 MiB
    files      rank-00000.safetensors --> bytes, hash of its header
    state      progress, loss scale, ledger, ...: plain JSON

Reading it needs no torch. Contents are validated, too: parts that overlap, lie outside their file, or don't make up
their tensor are refused before a byte is allocated for them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import prod
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, ValidationInfo, WrapValidator

from lockstep.checkpoint import hashing
from lockstep.checkpoint.write_plan import WriteItem, check_cover
from lockstep.core.errors import RunFailed
from lockstep.distributed.shard_boxes import Box, TensorInfo

FORMAT_VERSION = 1
MAX_BYTES = 2**30  # of a manifest: about 100 TB of state
_MAX_HEADER = 100_000_000  # of a file; the limit of safetensors readers
_MAX_DIMS = 64  # torch's own limit
_MAX_FIELDS = 32  # of any record below

ELEMENT_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


class _FirstError(RunFailed):
    """Ends a validation at the first error.

    pydantic would collect all: a million wrong entries, 15 MB of text, became 4 GB of errors.
    """


def _stop_at_first(value: Any, validate: Callable[[Any], Any], info: ValidationInfo) -> Any:
    if isinstance(value, dict) and len(value) > _MAX_FIELDS:
        raise _FirstError(f"{info.field_name}: an entry has {len(value):,} fields")
    try:
        return validate(value)
    except ValidationError as error:
        raise _FirstError(_first_error(error, str(info.field_name))) from None


_StopAtFirst = WrapValidator(_stop_at_first)
_FromList = Field(strict=False)  # JSON has lists where Python has tuples
Count = Annotated[int, Field(ge=0, lt=2**63)]
Dims = Annotated[tuple[Count, ...], _FromList, Field(max_length=_MAX_DIMS), FailFast()]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
FileName = Annotated[str, Field(pattern=r"^rank-[0-9]{5,9}\.safetensors$")]
Name = Annotated[str, Field(min_length=1, max_length=4096)]


class CorruptCheckpoint(RunFailed):
    """A checkpoint whose bytes are not what was written.

    Attributes:
        file: Name of the file within the checkpoint.
        reason: What is wrong with it.
    """

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(f"{file}: {reason}")
        self.file = file
        self.reason = reason

    def __reduce__(self) -> tuple[type[CorruptCheckpoint], tuple[str, str]]:
        return type(self), (self.file, self.reason)


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)


class PartEntry(_Record):
    """A box of a tensor, contiguous in one file.

    Attributes:
        at: First byte in the file.
        blocks: Hashes of its bytes, block by block.
    """

    file: FileName
    at: Count
    offsets: Dims
    sizes: Dims
    blocks: Annotated[tuple[Hash, ...], _FromList, FailFast()]

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.sizes)


class TensorEntry(_Record):
    """A tensor and the parts that make it up."""

    dtype: Literal[tuple(ELEMENT_BYTES)]  # type: ignore[valid-type]
    shape: Dims
    parts: Annotated[tuple[Annotated[PartEntry, _StopAtFirst], ...], _FromList]

    @property
    def info(self) -> TensorInfo:
        return TensorInfo(self.dtype, self.shape)

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * ELEMENT_BYTES[self.dtype]


class FileEntry(_Record):
    """A file of tensors.

    Attributes:
        size: Bytes.
        header: Bytes before the first tensor.
        header_hash: Hash of these.
    """

    size: Count
    header: Annotated[int, Field(ge=8, le=_MAX_HEADER)]
    header_hash: Hash


class RankRecord(_Record):
    """The part of a manifest about one rank's file, which rank 0 merges into the whole."""

    file: FileEntry
    tensors: dict[Name, TensorEntry]


class Manifest(_Record):
    """The contents of a checkpoint.

    Attributes:
        run: Id of the run.
        ranks: Number of ranks that wrote it.
        written: Time of writing, in UTC.
        state: What resuming needs in addition to the tensors; plain JSON.
        metrics: Results of the evaluation at this step, `set.metric`, None where one was not finite; empty without one.
        config: The run's config, where it differs from the defaults.
        environment: Versions, and the state of the user's code.
    """

    format_version: Literal[1]
    run: Name
    step: Count
    samples: Count
    tokens: Count
    ranks: Annotated[int, Field(ge=1)]
    written: str
    files: dict[Annotated[FileName, _StopAtFirst], Annotated[FileEntry, _StopAtFirst]]
    tensors: dict[Annotated[Name, _StopAtFirst], Annotated[TensorEntry, _StopAtFirst]]
    state: dict[str, Any]
    metrics: dict[str, Annotated[float | None, _StopAtFirst]]
    config: dict[str, Any]
    environment: dict[str, Any]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())


def to_bytes(manifest: Manifest) -> bytes:
    """Serialize a manifest. The text is canonical: equal manifests have equal bytes."""
    return _with_hash(manifest.model_dump(mode="json"))


def from_bytes(data: bytes) -> Manifest:
    """Return the manifest that `data` holds.

    Raises:
        CorruptCheckpoint: The bytes are no manifest that this version can read.
    """
    try:
        body = json.loads(data)["manifest"]
        intact = _with_hash(body) == data
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise _corrupt(f"is not a manifest: {type(error).__name__}: {str(error)[:200]}") from None
    if not intact:
        raise _corrupt("its hash does not match its contents")
    version = body.get("format_version") if isinstance(body, dict) else None
    if type(version) is not int or version != FORMAT_VERSION:
        raise _corrupt(
            f"has format version {version!r}; this Lockstep reads {FORMAT_VERSION}: a newer one may have written it"
        )
    if len(body) > _MAX_FIELDS:
        raise _corrupt(f"is invalid: it has {len(body):,} fields")
    try:
        manifest = Manifest.model_validate(body)
    except ValidationError as error:
        raise _corrupt(f"is invalid: {_first_error(error)}") from None
    except _FirstError as error:
        raise _corrupt(f"is invalid: {error}") from None
    _check_parts(manifest)
    return manifest


def _with_hash(body: Any) -> bytes:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return f'{{"manifest":{text},"xxh3_128":"{hashing.hash_bytes(text.encode())}"}}\n'.encode()


def _check_parts(manifest: Manifest) -> None:
    """Raise CorruptCheckpoint unless parts make up their tensors, and each byte of a file belongs to one part."""
    ranges: dict[str, list[tuple[int, int]]] = {name: [(0, file.header)] for name, file in manifest.files.items()}
    for name, entry in manifest.tensors.items():
        if not entry.parts:
            raise _corrupt(f"{name} has no parts")
        for part in entry.parts:
            size = prod(part.sizes) * ELEMENT_BYTES[entry.dtype]
            if part.file not in manifest.files or part.at + size > manifest.files[part.file].size:
                raise _corrupt(f"{name} lies outside of its file {part.file}")
            if len(part.offsets) != len(entry.shape) or len(part.sizes) != len(entry.shape):
                raise _corrupt(f"a part of {name} has other dims than {entry.info}")
            if len(part.blocks) != -(-size // hashing.BLOCK_BYTES):
                raise _corrupt(f"{name} has {len(part.blocks)} hashes for {size:,} bytes")
            ranges[part.file].append((part.at, part.at + size))
        try:
            check_cover(name, [WriteItem(name, entry.info, part.box) for part in entry.parts])
        except RunFailed as error:
            raise _corrupt(str(error)) from None
    for file, used in ranges.items():
        _check_every_byte_is_used(file, manifest.files[file].size, used)


def _check_every_byte_is_used(file: str, size: int, ranges: list[tuple[int, int]]) -> None:
    """Raise CorruptCheckpoint unless the ranges follow each other without gap or overlap: then every byte is hashed."""
    end = 0
    for start, stop in sorted(ranges):
        if start != end:
            raise _corrupt(
                f"bytes {min(end, start):,} to {max(end, start):,} of {file} belong to two tensors or to none"
            )
        end = stop
    if end != size:
        raise _corrupt(f"{file} has {size:,} bytes, of which {end:,} are accounted for")


def _corrupt(reason: str) -> CorruptCheckpoint:
    return CorruptCheckpoint("manifest.json", reason)


def _first_error(error: ValidationError, *above: str) -> str:
    details = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"{'.'.join(map(str, (*above, *details['loc'])))[:200]}: {details['msg'][:200]}"
