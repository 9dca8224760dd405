"""Compares two checkpoints: names, dtypes, shapes, values, config and state. Every byte read is verified.

tensors in both, of equal dtype and shape --> read, some at a time --> bitwise identical? --> otherwise by how much
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint.inspection import as_verification_error
from lockstep.checkpoint.manifest import ELEMENT_BYTES
from lockstep.checkpoint.reading import Reader, read_manifest
from lockstep.core.formatting import differing
from lockstep.distributed.shard_boxes import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.checkpoint.storage import Storage

_CHUNK = 2**20  # elements at a time, since they are widened to float64
_READ_BYTES = 64 * 2**20  # of each checkpoint at a time: small tensors together, with few calls of a store
_LOCATIONS = ("run.folder", "checkpoint.folder")
_HISTORY = ("seconds", "ledger", "left_out")


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """The difference between two tensors of equal dtype and shape.

    Attributes:
        differing: Number of elements that differ bitwise.
        absolute, relative: Largest difference, and as a share of the larger magnitude; None if no pair is finite.
    """

    name: str
    elements: int
    differing: int
    absolute: float | None
    relative: float | None
    not_finite: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """The differences between two checkpoints. Where and how fast they were made doesn't count.

    Attributes:
        alone: Names of tensors that only the first has, and that only the second has.
        kinds: Tensors that differ in shape or dtype: name, the first's, the second's.
        config, state: The first's value and the second's, by dotted key; None where there is none.
    """

    alone: tuple[tuple[str, ...], tuple[str, ...]]
    kinds: tuple[tuple[str, TensorInfo, TensorInfo], ...]
    values: tuple[TensorDifference, ...]
    same: int
    config: Mapping[str, tuple[Any, Any]]
    state: Mapping[str, tuple[Any, Any]]

    @property
    def equal(self) -> bool:
        """True if training continues identically from both."""
        return not (any(self.alone) or self.kinds or self.values or self.config or self.state)


class OpenCheckpoint:
    """A checkpoint to read tensors of. Raises VerificationError, here and in `tensors`, if it is damaged."""

    def __init__(self, storage: Storage, name: str) -> None:
        self._storage = storage
        self._name = name
        with as_verification_error(storage, name):
            self.manifest = read_manifest(storage, name)

    def info(self, name: str) -> TensorInfo:
        return self.manifest.tensors[name].info

    def tensors(self, names: Sequence[str]) -> list[Tensor]:
        """Read and verify whole tensors, on the CPU."""
        with as_verification_error(self._storage, self._name):
            return list(Reader(self._storage, self._name, self.manifest).tensors(names).values())


def compare(first: OpenCheckpoint, second: OpenCheckpoint) -> Comparison:
    """Compare two checkpoints, with some tensors of each in memory at a time. Raises VerificationError."""
    ours, theirs = first.manifest, second.manifest
    both = [name for name in ours.tensors if name in theirs.tensors]
    comparable = [name for name in both if first.info(name) == second.info(name)]
    differences = (
        tensor_difference(name, *tensors)
        for names in _read_together(first, comparable)
        for name, *tensors in zip(names, first.tensors(names), second.tensors(names), strict=True)
    )
    values = tuple(difference for difference in differences if difference is not None)
    return Comparison(
        alone=(
            tuple(name for name in ours.tensors if name not in theirs.tensors),
            tuple(name for name in theirs.tensors if name not in ours.tensors),
        ),
        kinds=tuple((name, first.info(name), second.info(name)) for name in both if name not in set(comparable)),
        values=values,
        same=len(comparable) - len(values),
        config=_differences(ours.config, theirs.config, _LOCATIONS),
        state=_differences(ours.state, theirs.state, _HISTORY),
    )


def _read_together(checkpoint: OpenCheckpoint, names: Iterable[str]) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for name in names:
        info = checkpoint.info(name)
        nbytes = info.whole.elements * ELEMENT_BYTES[info.dtype]
        if group and size + nbytes > _READ_BYTES:
            yield group
            group, size = [], 0
        group.append(name)
        size += nbytes
    if group:
        yield group


def tensor_difference(name: str, first: Tensor, second: Tensor) -> TensorDifference | None:
    """Compare two tensors of equal dtype and shape; return None if they are bitwise identical."""
    import torch

    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()]
    differing = not_finite = 0
    absolute: float | None = None
    relative: float | None = None
    for a, b in zip(*(torch.split(tensor.reshape(-1), _CHUNK) for tensor in (first, second)), strict=True):
        differ = a.view(bits) != b.view(bits)
        number = int(differ.sum())
        if not number:
            continue
        differing += number
        a, b = a[differ].to(torch.float64), b[differ].to(torch.float64)
        finite = a.isfinite() & b.isfinite()
        a, b = a[finite], b[finite]
        not_finite += number - len(a)
        if len(a):
            gaps = (a - b).abs()
            shares = gaps / a.abs().maximum(b.abs()).clamp(min=5e-324)
            absolute, relative = max(absolute or 0.0, gaps.max().item()), max(relative or 0.0, shares.max().item())
    return TensorDifference(name, first.numel(), differing, absolute, relative, not_finite) if differing else None


def _differences(first: Any, second: Any, ignored: tuple[str, ...]) -> dict[str, tuple[Any, Any]]:
    return {key: pair for key, pair in differing(first, second).items() if key not in ignored}
