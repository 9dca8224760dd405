"""In what two checkpoints differ: names, kinds, values, config and state. Every byte is verified while it is read.

tensors in both, of one kind --> read, one at a time --> the same bits? --> otherwise how far apart
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.checkpoint.inspection import as_verification_error
from lockstep.checkpoint.manifest import Manifest
from lockstep.checkpoint.reading import Reader, ReadItem, read_manifest
from lockstep.distributed.shard_boxes import TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.checkpoint.storage import Storage

_CHUNK = 2**20  # elements at a time, since they become float64
_PLACES = ("run.folder", "checkpoint.folder")
_HISTORY = ("seconds", "ledger")


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """How far apart two tensors of one kind are.

    Attributes:
        differing: elements whose bits differ, of `elements`.
        absolute, relative: the largest difference, the second as a share of the larger magnitude; of elements that are
            finite in both, None if there are none.
        not_finite: differing elements that are NaN or infinite in either.
    """

    name: str
    elements: int
    differing: int
    absolute: float | None
    relative: float | None
    not_finite: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Where they lie, in what time and in how many attempts they were made doesn't count.

    Attributes:
        alone: names of tensors that only the first has, and that only the second has.
        kinds: tensors that differ in shape or dtype: name, the first's kind, the second's.
        values: those that differ in value.
        same: number of tensors that are the same.
        config, state: by dotted key, the first's value and the second's; None where there is none.
    """

    alone: tuple[tuple[str, ...], tuple[str, ...]]
    kinds: tuple[tuple[str, TensorInfo, TensorInfo], ...]
    values: tuple[TensorDifference, ...]
    same: int
    config: Mapping[str, tuple[Any, Any]]
    state: Mapping[str, tuple[Any, Any]]

    @property
    def equal(self) -> bool:
        """Whether training would go on alike from both."""
        return not (any(self.alone) or self.kinds or self.values or self.config or self.state)


class OpenCheckpoint:
    """One of the two; use as a context manager.

    Raises:
        VerificationError: on entering and in `tensor`, it is damaged.
    """

    def __init__(self, storage: Storage, name: str) -> None:
        self._storage = storage
        self._name = name
        self._open = ExitStack()

    def __enter__(self) -> OpenCheckpoint:
        with ExitStack() as opening, as_verification_error(self._storage, self._name):
            opening.enter_context(self._storage.read_lock(self._name))
            self.manifest = read_manifest(self._storage, self._name)
            self._reader = opening.enter_context(Reader(self._storage, self._name, self.manifest))
            self._open = opening.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def kind(self, name: str) -> TensorInfo:
        """Of a tensor that it has."""
        return self.manifest.tensors[name].info

    def tensor(self, name: str) -> Tensor:
        """All of it, verified, on the CPU."""
        import torch

        kind = self.kind(name)
        memory = torch.empty(kind.shape, dtype=getattr(torch, kind.dtype))
        with as_verification_error(self._storage, self._name):
            self._reader.read([ReadItem(name, kind.whole, memory)])
        return memory


def compare(first: OpenCheckpoint, second: OpenCheckpoint) -> Comparison:
    """Holds one tensor of each in memory at a time. Raises VerificationError."""
    one, other = first.manifest, second.manifest
    both = [name for name in one.tensors if name in other.tensors]
    alike = [name for name in both if first.kind(name) == second.kind(name)]
    found = [tensor_difference(name, first.tensor(name), second.tensor(name)) for name in alike]
    values = tuple(one for one in found if one is not None)
    return Comparison(
        alone=(_lacking(one, other), _lacking(other, one)),
        kinds=tuple((name, first.kind(name), second.kind(name)) for name in both if name not in set(alike)),
        values=values,
        same=len(alike) - len(values),
        config=_differences(one.config, other.config, _PLACES),
        state=_differences(one.state, other.state, _HISTORY),
    )


def tensor_difference(name: str, one: Tensor, other: Tensor) -> TensorDifference | None:
    """Of tensors of one kind; None if they have the same bits."""
    import torch

    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    one, other = one.reshape(-1), other.reshape(-1)
    differing = not_finite = 0
    absolute: float | None = None
    relative: float | None = None
    for start in range(0, one.numel(), _CHUNK):
        mine, theirs = one[start : start + _CHUNK], other[start : start + _CHUNK]
        differ = mine.view(bits) != theirs.view(bits)
        number = int(differ.sum())
        if not number:
            continue
        differing += number
        gaps, shares = _gaps(mine[differ].to(torch.float64), theirs[differ].to(torch.float64))
        not_finite += number - len(gaps)
        if len(gaps):
            absolute, relative = max(absolute or 0.0, gaps.max().item()), max(relative or 0.0, shares.max().item())
    return TensorDifference(name, one.numel(), differing, absolute, relative, not_finite) if differing else None


def _gaps(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Absolute and relative, of those that are finite in both."""
    finite = one.isfinite() & other.isfinite()
    one, other = one[finite], other[finite]
    gaps = (one - other).abs()
    return gaps, gaps / one.abs().maximum(other.abs()).clamp(min=5e-324)


def _lacking(one: Manifest, other: Manifest) -> tuple[str, ...]:
    return tuple(name for name in one.tensors if name not in other.tensors)


def _differences(one: Any, other: Any, but: tuple[str, ...]) -> dict[str, tuple[Any, Any]]:
    """By dotted key; mappings are compared key by key."""
    return {key: pair for key, pair in _pairs(one, other, "") if pair[0] != pair[1] and key not in but}


def _pairs(one: Any, other: Any, key: str) -> Iterator[tuple[str, tuple[Any, Any]]]:
    if not (_branches(one) and _branches(other)):
        yield key, (one, other)
        return
    left, right = one or {}, other or {}
    for name in [*left, *(name for name in right if name not in left)]:
        yield from _pairs(left.get(name), right.get(name), f"{key}.{name}" if key else str(name))


def _branches(value: Any) -> bool:
    """A mapping, or what isn't there at all beside one."""
    return isinstance(value, Mapping) or value is None
