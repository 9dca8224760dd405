"""What a checkpoint says of itself: manifest.json, written last, hashed itself, checked before anything is believed.

    {"manifest": {"format_version": 1, "run": ..., "step": 480, "files": ..., "tensors": ..., ...},
     "xxh3_128": "..."}

    tensors    model.layers.0.weight --> float32 [256, 64], in parts: file, place, box, a hash for each 16 MiB
    files      rank-00000.safetensors --> bytes, hash of its header
    state      progress, loss scale, ledger, ...: plain JSON

No torch is needed to read it. What it says is checked for sense too: parts that overlap, lie outside their file, or
don't make up their tensor are refused before a byte is allocated for them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import prod
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError, ValidationInfo, WrapValidator

from lockstep.checkpoint import fingerprints
from lockstep.checkpoint.boxes import Piece, check_cover
from lockstep.core.errors import RunFailed
from lockstep.distributed.shard_boxes import Box, TensorInfo

FORMAT_VERSION = 1
MOST_BYTES = 2**30  # of a manifest: about 100 TB of state
_MOST_HEADER = 100_000_000  # of a file; what readers of safetensors allow
_MOST_DIMS = 64  # torch's own limit
_MOST_FIELDS = 32  # of any record below

ELEMENT_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


class _Wrong(RunFailed):
    """Ends a validation at the first fault. pydantic would collect them all: a million wrong entries, 15 MB of text,
    became 4 GB of errors."""


def _at_once(value: Any, validate: Callable[[Any], Any], where: ValidationInfo) -> Any:
    if isinstance(value, dict) and len(value) > _MOST_FIELDS:
        raise _Wrong(f"{where.field_name}: one of them has {len(value):,} fields")
    try:
        return validate(value)
    except ValidationError as error:
        raise _Wrong(_first(error, str(where.field_name))) from None


_AtOnce = WrapValidator(_at_once)
_Listed = Field(strict=False)  # JSON has lists where Python has tuples
Count = Annotated[int, Field(ge=0, lt=2**63)]
Dims = Annotated[tuple[Count, ...], _Listed, Field(max_length=_MOST_DIMS), FailFast()]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
FileName = Annotated[str, Field(pattern=r"^rank-[0-9]{5,9}\.safetensors$")]
Name = Annotated[str, Field(min_length=1, max_length=4096)]


class CorruptCheckpoint(RunFailed):
    """A checkpoint that is not what was written.

    Attributes:
        file: within the checkpoint.
    """

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(f"{file}: {reason}")
        self.file = file
        self.reason = reason

    def __reduce__(self) -> tuple[type[CorruptCheckpoint], tuple[str, str]]:
        return type(self), (self.file, self.reason)


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)


class Part(_Record):
    """A box of a tensor, contiguous in one file.

    Attributes:
        at: byte in the file.
        blocks: hashes of its bytes, cut into blocks.
    """

    file: FileName
    at: Count
    offsets: Dims
    sizes: Dims
    blocks: Annotated[tuple[Hash, ...], _Listed, FailFast()]

    @property
    def box(self) -> Box:
        return Box(self.offsets, self.sizes)


class TensorEntry(_Record):
    """Attributes:
    dtype: torch's name for it.
    """

    dtype: Literal[tuple(ELEMENT_BYTES)]  # type: ignore[valid-type]
    shape: Dims
    parts: Annotated[tuple[Annotated[Part, _AtOnce], ...], _Listed]

    @property
    def info(self) -> TensorInfo:
        return TensorInfo(self.dtype, self.shape)

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * ELEMENT_BYTES[self.dtype]


class FileEntry(_Record):
    """Attributes:
    size: bytes.
    header: bytes before the first tensor.
    header_hash: of these.
    """

    size: Count
    header: Annotated[int, Field(ge=8, le=_MOST_HEADER)]
    header_hash: Hash


class Manifest(_Record):
    """Attributes:
    run: identity of the run.
    step, samples, tokens: how far it was.
    ranks: that wrote it.
    written: when, in UTC.
    state: what goes on besides tensors; plain JSON.
    metrics: of the evaluation at this very step, `set.metric`, None for what wasn't finite; empty if there was none.
    config: of the run, as far as it was not the default.
    environment: versions, and the state of the user's code.
    """

    format_version: Literal[1]
    run: Name
    step: Count
    samples: Count
    tokens: Count
    ranks: Annotated[int, Field(ge=1)]
    written: str
    files: dict[Annotated[FileName, _AtOnce], Annotated[FileEntry, _AtOnce]]
    tensors: dict[Annotated[Name, _AtOnce], Annotated[TensorEntry, _AtOnce]]
    state: dict[str, Any]
    metrics: dict[str, Annotated[float | None, _AtOnce]]
    config: dict[str, Any]
    environment: dict[str, Any]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())


def to_bytes(manifest: Manifest) -> bytes:
    """As it is stored. The text is canonical: the same manifest is the same bytes."""
    body = manifest.model_dump(mode="json")
    return _sealed(body)


def from_bytes(data: bytes) -> Manifest:
    """Return the manifest that `data` holds.

    Raises:
        CorruptCheckpoint: the bytes are no manifest that this version can read.
    """
    try:
        outer = json.loads(data)
        body = outer["manifest"]
        whole = _sealed(body) == data
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CorruptCheckpoint(
            "manifest.json", f"is not a manifest: {type(error).__name__}: {_short(error)}"
        ) from None
    if not whole:
        raise CorruptCheckpoint("manifest.json", "its hash is not that of its contents")
    version = body.get("format_version") if isinstance(body, dict) else None
    if type(version) is not int or version != FORMAT_VERSION:
        raise CorruptCheckpoint(
            "manifest.json",
            f"has format version {version!r}; this Lockstep reads {FORMAT_VERSION}: a newer one may have written it",
        )
    manifest = _validated(body)
    _check(manifest)
    return manifest


def _validated(body: dict[str, Any]) -> Manifest:
    if len(body) > _MOST_FIELDS:
        raise CorruptCheckpoint("manifest.json", f"makes no sense: it has {len(body):,} fields")
    try:
        return Manifest.model_validate(body)
    except ValidationError as error:
        raise CorruptCheckpoint("manifest.json", f"makes no sense: {_first(error)}") from None
    except _Wrong as fault:
        raise CorruptCheckpoint("manifest.json", f"makes no sense: {fault}") from None


def _sealed(body: Any) -> bytes:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    seal = fingerprints.of_bytes(text.encode())
    return f'{{"manifest":{text},"xxh3_128":"{seal}"}}\n'.encode()


def _check(manifest: Manifest) -> None:
    """That what it says can be true."""
    taken: dict[str, list[tuple[int, int]]] = {name: [(0, file.header)] for name, file in manifest.files.items()}
    for name, entry in manifest.tensors.items():
        element = ELEMENT_BYTES[entry.dtype]
        if not entry.parts:
            raise CorruptCheckpoint("manifest.json", f"{name} has no bytes anywhere")
        for part in entry.parts:
            size = prod(part.sizes) * element
            if part.file not in manifest.files or part.at + size > manifest.files[part.file].size:
                raise CorruptCheckpoint("manifest.json", f"{name} lies outside of its file {part.file}")
            if len(part.offsets) != len(entry.shape) or len(part.sizes) != len(entry.shape):
                raise CorruptCheckpoint("manifest.json", f"a part of {name} has other dims than {entry.info}")
            if len(part.blocks) != -(-size // fingerprints.BLOCK):
                raise CorruptCheckpoint("manifest.json", f"{name} has {len(part.blocks)} hashes for {size:,} bytes")
            taken[part.file].append((part.at, part.at + size))
        try:
            check_cover(name, [Piece(name, entry.info, part.box) for part in entry.parts])
        except RunFailed as error:
            raise CorruptCheckpoint("manifest.json", str(error)) from None
    for file, ranges in taken.items():
        _check_tiling(file, manifest.files[file].size, ranges)


def _check_tiling(file: str, size: int, ranges: list[tuple[int, int]]) -> None:
    """Every byte of a file is some tensor's, or its header's: so every byte is hashed."""
    at = 0
    for start, stop in sorted(ranges):
        if start != at:
            raise CorruptCheckpoint(
                "manifest.json", f"bytes {min(at, start):,} to {max(at, start):,} of {file} are two tensors' or none's"
            )
        at = stop
    if at != size:
        raise CorruptCheckpoint("manifest.json", f"{file} has {size:,} bytes, of which {at:,} are accounted for")


def _short(error: Exception) -> str:
    return str(error)[:200]


def _first(error: ValidationError, *above: str) -> str:
    details = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return f"{'.'.join(map(str, (*above, *details['loc'])))[:200]}: {details['msg'][:200]}"
