"""The manifest of a checkpoint: manifest.json, written last, with a hash of itself, validated before anything is read.

    {"manifest": {"format_version": 2, "run": ..., "step": 480, "files": ..., "tensors": ..., ...},
     "xxh3_128": "..."}

    tensors    model.layers.0.weight --> float32 [256, 64], grid 3
    grids      3 --> cut at rows 0, 64, 128, 192: by ranks 0, 1, 2, 3      one for all tensors that are sharded alike
    files      rank-00000.safetensors --> bytes, hash of its header       where each part and its hashes are
    state      progress, loss scale, ledger, ...: plain JSON

It grows with the number of tensors and of ranks, not with their product. Reading it needs no torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cached_property
from math import prod
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from lockstep.checkpoint import hashing
from lockstep.checkpoint.shard_grid import Grid
from lockstep.core.errors import RunFailed
from lockstep.core.failure_kinds import FailureKind
from lockstep.distributed.shard_boxes import TensorInfo

FORMAT_VERSION = 2
MAX_BYTES = 2**30  # of a manifest
MAX_HEADER = 100_000_000  # of a file; the limit of safetensors readers
_MAX_DIMS = 64  # torch's own limit

ELEMENT_BYTES: Mapping[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
}  # fmt: skip


FromList = Field(strict=False)  # JSON has lists where Python has tuples
Count = Annotated[int, Field(ge=0, lt=2**63)]
Dims = Annotated[tuple[Count, ...], FromList, Field(max_length=_MAX_DIMS), FailFast()]
Starts = Annotated[tuple[Count, ...], FromList, FailFast()]
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
FileName = Annotated[str, Field(pattern=r"^rank-[0-9]{5,9}\.safetensors$")]
Name = Annotated[str, Field(min_length=1, max_length=4096)]


class CorruptCheckpoint(RunFailed):
    """A damaged checkpoint: a file within it, and what is wrong with it."""

    kind = FailureKind.DAMAGED

    def __init__(self, file: str, reason: str) -> None:
        super().__init__(f"{file}: {reason}")
        self.file = file
        self.reason = reason

    def __reduce__(self) -> tuple[type[CorruptCheckpoint], tuple[str, str]]:
        return type(self), (self.file, self.reason)


class Record(BaseModel):
    """Immutable, without fields that it doesn't know."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False, defer_build=True)


_Cut = Annotated[tuple[Annotated[int, Field(ge=-1, lt=_MAX_DIMS)], Starts], FromList, FailFast()]


class GridEntry(Record):
    """A grid: where tensors are cut, as pairs of a dim and its starts, and the rank that wrote each cell."""

    cuts: Annotated[tuple[_Cut, ...], FromList, FailFast()]
    ranks: Starts

    @cached_property
    def grid(self) -> Grid:
        return Grid(self.cuts, self.ranks)


class TensorEntry(Record):
    """A tensor, and the index of its grid."""

    dtype: Literal[tuple(ELEMENT_BYTES)]  # type: ignore[valid-type]
    shape: Dims
    grid: Count

    @property
    def info(self) -> TensorInfo:
        return TensorInfo(self.dtype, self.shape)

    @property
    def size(self) -> int:
        """Bytes."""
        return prod(self.shape) * ELEMENT_BYTES[self.dtype]


class FileEntry(Record):
    """A file of tensors: its bytes, and the number and hash of the bytes before the first tensor."""

    size: Count
    header: Annotated[int, Field(ge=8, le=MAX_HEADER)]
    header_hash: Hash


class Manifest(Record):
    """The contents of a checkpoint that a number of ranks wrote for a run, by its id, at a time in UTC.

    Attributes:
        state: What resuming needs in addition to the tensors; plain JSON.
        metrics: Results of the evaluation at this step, `set.metric`; None: not finite.
        config: The run's config, where it differs from the defaults.
        environment: Versions, and the state of the user's code.
    """

    format_version: Literal[2]
    run: Name
    step: Count
    samples: Count
    tokens: Count
    ranks: Annotated[int, Field(ge=1)]
    written: str
    files: dict[FileName, FileEntry]
    state: dict[str, Any]
    metrics: dict[str, float | None]
    config: dict[str, Any]
    environment: dict[str, Any]
    grids: Annotated[tuple[GridEntry, ...], FromList, FailFast()]
    tensors: dict[Name, TensorEntry]

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())

    def grid_of(self, name: str) -> Grid:
        """Return the grid of a tensor."""
        return self.grids[self.tensors[name].grid].grid


def to_bytes(manifest: Manifest) -> bytes:
    """Serialize a manifest. The text is canonical: equal manifests have equal bytes."""
    return _with_hash(manifest.model_dump(mode="json"))


def with_files(data: bytes, files: Mapping[str, Any]) -> bytes:
    """Return the manifest that `data` holds, which lists these files instead. Raises CorruptCheckpoint."""
    return _with_hash({**intact_body(data), "files": files})


def amended(
    data: bytes, state: Mapping[str, Any], metrics: Mapping[str, float | None], environment: Mapping[str, Any]
) -> bytes:
    """Return the manifest that `data` holds with these metrics, state and environment. Raises CorruptCheckpoint."""
    body = intact_body(data)
    changed = {name: {**body[name], **new} for name, new in (("state", state), ("environment", environment))}
    return _with_hash({**body, **changed, "metrics": dict(metrics)})


def from_bytes(data: bytes) -> Manifest:
    """Return the manifest that `data` holds. Raises CorruptCheckpoint."""
    body = intact_body(data)
    version = body.get("format_version") if isinstance(body, dict) else None
    if type(version) is not int or version != FORMAT_VERSION:
        raise corrupt(f"has format version {version!r}; this Lockstep reads version {FORMAT_VERSION}")
    try:
        manifest = Manifest.model_validate(body)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False, include_input=False)[0]
        key = " ".join(".".join(map(str, details["loc"]))[:200].split())
        raise corrupt(f"is invalid: {key}: {details['msg'][:200]}") from None
    _check_grids(manifest)
    return manifest


def intact_body(data: bytes) -> Any:
    """Return what a manifest holds, not yet validated. Raises CorruptCheckpoint."""
    try:
        body = json.loads(data)["manifest"]
        intact = _with_hash(body) == data
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise corrupt(f"is not a manifest: {type(error).__name__}: {str(error)[:200]}") from None
    if not intact:
        raise corrupt("its hash does not match its contents")
    return body


def _with_hash(body: Any) -> bytes:
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return f'{{"manifest":{text},"xxh3_128":"{hashing.hash_bytes(text.encode())}"}}\n'.encode()


def _check_grids(manifest: Manifest) -> None:
    if len(manifest.files) != manifest.ranks or manifest.files.keys() != set(map(shard_file, range(manifest.ranks))):
        raise corrupt(f"has other files than the {manifest.ranks:,} ranks wrote")
    checked: set[tuple[int, tuple[int, ...]]] = set()
    for name, entry in manifest.tensors.items():
        key = entry.grid, entry.shape
        if key in checked:
            continue
        if entry.grid >= len(manifest.grids):
            raise corrupt(f"{name} has grid {entry.grid}, and there are {len(manifest.grids)}")
        if not manifest.grids[entry.grid].grid.fits(entry.shape, manifest.ranks):
            raise corrupt(f"{name} has a grid that {manifest.ranks} ranks can't have of {list(entry.shape)[:99]}")
        checked.add(key)


def shard_file(rank: int) -> str:
    """Return the name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


def corrupt(reason: str) -> CorruptCheckpoint:
    return CorruptCheckpoint("manifest.json", reason)
