"""The part of a tensor that a rank holds: boxes in the tensor's index space.

    whole, of 8 rows              on the second of two ranks
    +-----------+
    |  box 0    |
    +-----------+
    |  box 1    |                 LocalShards(kind, (box 1,)), and the memory of it
    +-----------+

A `FlatShard` is a range of elements, which may begin and end within a row:

    . . . #        elements 3 to 9 of [3, 4]: three boxes, one after the other in memory
    # # # #
    # . . .

DTensors are recognized by a method, since importing the class takes 0.7 s. Tensors with the same shape, placements and
coordinate share their boxes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from math import prod
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.distributed.tensor import DTensor

    from lockstep.core.protocols import Axis


@dataclass(frozen=True, slots=True)
class Box:
    """A part of a tensor, by offset and size along each dim; both are empty for a 0-dim tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def elements(self) -> int:
        return prod(self.sizes)

    def meets(self, other: Box) -> Box | None:
        """Return the intersection; None: it is empty."""
        offsets = tuple(map(max, self.offsets, other.offsets))
        dims = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        ends = [min(a + n, b + m) for a, n, b, m in dims]
        sizes = tuple(end - offset for end, offset in zip(ends, offsets, strict=True))
        return Box(offsets, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Return its index in `outer`."""
        starts = [a - b for a, b in zip(self.offsets, outer.offsets, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.sizes, strict=True))


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Shape, and dtype by torch's name, such as `bfloat16`."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def whole(self) -> Box:
        return Box((0,) * len(self.shape), self.shape)

    def __str__(self) -> str:
        return f"{self.dtype} [{', '.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class LocalShards:
    """The boxes that one rank holds of a tensor."""

    kind: TensorInfo
    boxes: tuple[Box, ...]


class FlatShard:
    """The range of elements that a rank holds of a flattened tensor, as ZeRO shards it.

    Attributes:
        memory: This rank's elements, 1-dim; perhaps none.
        start: Index of the first one in the flattened tensor.
        shape: Of the whole tensor.
        device: Where ranks exchange it, if its memory is elsewhere.
        length: Elements of each rank; None: ranges of any length.
    """

    def __init__(
        self,
        memory: Tensor,
        start: int,
        shape: Sequence[int],
        device: torch.device | None = None,
        length: int | None = None,
    ) -> None:
        self.memory = memory
        self.device = device or memory.device
        self.start = start
        self.shape = tuple(shape)
        self.length = length

    @property
    def elements(self) -> int:
        """Number of this rank's elements."""
        return self.memory.numel()

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.dtype

    def to_local(self) -> Tensor:
        return self.memory

    def __create_chunk_list__(self) -> list[Box]:  # a DTensor's method
        return list(flat_boxes(self.shape, self.start, self.start + self.elements))

    def of(self, whole: Tensor) -> Tensor:
        """Return the same elements of a whole tensor."""
        return whole.reshape(-1)[self.start : self.start + self.elements]


def flat_boxes(shape: Sequence[int], start: int, stop: int) -> Iterator[Box]:
    """Yield elements `start` to `stop` as boxes: the rest of a row, whole rows, the beginning of one."""
    if stop <= start:
        return
    if len(shape) < 2:
        yield Box((start,), (stop - start,)) if shape else Box((), ())
        return
    inner = tuple(shape[1:])
    length = prod(inner)
    first, head = divmod(start, length)
    last, tail = divmod(stop, length)

    def in_row(row: int, begin: int, end: int) -> Iterator[Box]:
        return (Box((row, *box.offsets), (1, *box.sizes)) for box in flat_boxes(inner, begin, end))

    if first == last:
        yield from in_row(first, head, tail)
        return
    if head:
        yield from in_row(first, head, length)
        first += 1
    if first < last:
        yield Box((first, *(0 for _ in inner)), (last - first, *inner))
    yield from in_row(last, 0, tail)


class ShardLike:
    """A shard of optimizer state, sharded like its parameter. Not a tensor: a DTensor would take 55 us to make.

    Attributes:
        memory: This rank's elements.
        like: The parameter's DTensor.
    """

    __slots__ = ("like", "memory")

    def __init__(self, memory: Tensor, like: Any) -> None:
        self.memory = memory
        self.like = like

    @property
    def shape(self) -> torch.Size:
        return cast("torch.Size", self.like.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.memory.dtype

    def to_local(self) -> Tensor:
        return self.memory

    def __create_chunk_list__(self) -> list[Any]:
        return cast("list[Any]", self.like.__create_chunk_list__())

    def as_dtensor(self) -> Tensor:
        return as_shard_of(self.like, self.memory)


def local_shards(tensor: Tensor) -> LocalShards:
    """Return the boxes that this rank holds of a tensor: one with all of it, or its shards' boxes."""
    kind = TensorInfo(dtype_name(tensor.dtype), tuple(tensor.shape))
    if not is_sharded(tensor) or not kind.whole.elements:
        return LocalShards(kind, (kind.whole,))
    return LocalShards(kind, _boxes(tensor))


_boxes_of: dict[Hashable, tuple[Box, ...]] = {}
"""The boxes of DTensors that were seen, by all that they depend on: a few dozen a model, without references to it."""


def _boxes(tensor: Any) -> tuple[Box, ...]:
    like = dtensor_of(tensor)
    if like is None:
        return _chunks(tensor)
    key = like.device_mesh.shape, like.device_mesh.get_coordinate(), like.placements, like.shape
    boxes = _boxes_of.get(key)
    if boxes is None:
        boxes = _boxes_of[key] = _chunks(like)
    return boxes


def _chunks(tensor: Any) -> tuple[Box, ...]:
    boxes = (Box(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in tensor.__create_chunk_list__())
    return tuple(box for box in boxes if box.elements)


def dtensor_of(tensor: Any) -> Any:
    """Return the DTensor that a tensor is, or is sharded like; None for other tensors."""
    if isinstance(tensor, ShardLike):
        return tensor.like
    return tensor if getattr(type(tensor), "device_mesh", None) is not None else None


def mesh_intervals(length: int, sizes: Sequence[int], strides: Sequence[int]) -> list[tuple[int, int]]:
    """Return start and size of each shard of a dim, in row-major order of the mesh axes that shard it.

    Args:
        sizes: Ranks along each axis.
        strides: Split factor of each axis; above 1 where FSDP shards beside tensor parallelism.
    """
    intervals = [(0, length)]
    if all(stride == 1 for stride in strides):
        for size in sizes:
            intervals = [shard for interval in intervals for shard in _chunk(*interval, size)]
        return intervals
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
    from torch.distributed.tensor.placement_types import _StridedShard

    placements = [Shard(0) if stride == 1 else _StridedShard(0, split_factor=stride) for stride in strides]
    shards = (
        _compute_local_shape_and_global_offset((length,), tuple(sizes), list(coordinate), placements)
        for coordinate in product(*map(range, sizes))
    )
    return [(offset, size) for (size,), (offset,) in shards]


@dataclass(frozen=True, slots=True)
class RowShards:
    """The ranks that FSDP shards rows over, and the whole shape of each parameter by name."""

    axis: Axis
    shapes: Mapping[str, tuple[int, ...]]

    def rows(self, name: str) -> list[int]:
        """Return the rows of a parameter on each rank, perhaps 0."""
        return [size for _, size in mesh_intervals(self.shapes[name][0], [self.axis.size], [1])]


def _chunk(start: int, length: int, number: int) -> Iterator[tuple[int, int]]:
    """Yield start and size of the shards of an interval; the last ones may be smaller, or empty."""
    step = -(-length // number)
    for index in range(number):
        before = min(index * step, length)
        yield start + before, min(step, length - before)


def shard_view(tensor: Tensor, box: Box) -> Tensor:
    """Return the live memory of one of the boxes of `local_shards`."""
    memory = local_tensor(tensor)
    if memory.numel() == box.elements:
        return memory if memory.shape == box.sizes else memory.view(box.sizes)
    return box_view(memory, local_shards(tensor).boxes, box)


def box_view(memory: Tensor, boxes: Sequence[Box], box: Box) -> Tensor:
    """Return the part of `memory`, which holds `boxes` one after the other, that belongs to `box`."""
    if len(boxes) == 1:
        return memory.view(box.sizes)
    before = sum(earlier.elements for earlier in boxes[: boxes.index(box)])
    return memory[before : before + box.elements].view(box.sizes)


def local_tensor(tensor: Tensor) -> Tensor:
    """Return the live memory that this rank holds of a tensor."""
    return live_part(tensor).detach()


def live_part(tensor: Any) -> Tensor:
    """Return the tensor that a rank holds of another: itself, not a view."""
    if not is_sharded(tensor):
        return cast("Tensor", tensor)
    if dtensor_of(tensor) is tensor:  # its to_local is a function of autograd, and takes 8 us
        return cast("Tensor", tensor._local_tensor)
    return cast("Tensor", tensor.to_local())


def local_shape(tensor: Any) -> tuple[int, ...]:
    """Return the shape of the memory that this rank holds of a tensor."""
    return (tensor.elements,) if isinstance(tensor, FlatShard) else tuple(local_tensor(tensor).shape)


def as_shard_of(whole: Tensor, value: Tensor) -> Tensor:
    """Return `value`, this rank's part of `whole`, as a tensor sharded like `whole`."""
    if not is_sharded(whole):
        return value
    like = cast("DTensor", whole)
    if value.device.type == "cpu" != like.device_mesh.device_type:  # offloaded, which `from_local` would undo
        made: Any = like.detach()
        made._local_tensor = value  # as FSDP2 sets it
        return cast("Tensor", made)
    return type(like).from_local(
        value, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


def shard_of(tensor: Any, whole: Tensor) -> Tensor:
    """Return this rank's part of `whole`, sharded like `tensor`."""
    if isinstance(tensor, FlatShard):
        return tensor.of(whole)
    if not is_sharded(tensor):
        return whole
    chunk = tensor.__create_chunk_list__()[0]
    return whole[Box(tuple(chunk.offsets), tuple(chunk.sizes)).within(local_shards(whole).kind.whole)]


def full_tensor(tensor: Any) -> Tensor:
    """Return all of a sharded tensor on each rank, bitwise identical. All ranks that hold its shards together.

    A tensor sharded along two axes is summed from shards in zeros: torch 2.13 hangs when it redistributes shards of
    unequal sizes along both.
    """
    import torch

    from lockstep.distributed.collectives import group_or_all

    if isinstance(tensor, FlatShard):
        flat = torch.zeros(prod(tensor.shape), dtype=tensor.dtype, device=tensor.device)
        tensor.of(flat).copy_(tensor.to_local())
        group_or_all(None).sum(bits(flat))
        return flat.view(tensor.shape)
    if isinstance(tensor, ShardLike):
        tensor = tensor.as_dtensor()
    # offloaded to the host, where nccl can't gather
    if tensor.device_mesh.device_type != tensor.to_local().device.type:
        moved = as_shard_of(tensor, tensor.to_local().to(tensor.device_mesh.device_type))
        return full_tensor(moved).to(tensor.to_local().device)
    axes = [axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    if len(axes) < 2:
        return cast("Tensor", tensor.full_tensor())
    whole = local_tensor(tensor).new_zeros(tensor.shape)
    everything = local_shards(whole).kind.whole
    for box in local_shards(tensor).boxes:
        whole[box.within(everything)] = shard_view(tensor, box)
    for axis in axes:
        group_or_all(tensor.device_mesh.get_group(axis)).sum(bits(whole))
    return whole


def bits(tensor: Tensor) -> Tensor:
    """Return the same memory as integers, which a sum with zeros leaves unchanged."""
    import torch

    flat = tensor.view(-1) if tensor.ndim else tensor.view(1)
    return flat.view(torch.int32) if tensor.dtype.itemsize % 4 == 0 else flat.view(torch.uint8)


def is_sharded(tensor: Tensor | None) -> bool:
    """Return whether it is a DTensor or another shard, without importing DTensors."""
    return getattr(type(tensor), "__create_chunk_list__", None) is not None


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return torch's name of a dtype, such as bfloat16."""
    return str(dtype).removeprefix("torch.")


def copy_from_full(tensor: Tensor, whole: Tensor) -> None:
    """Copy `whole` into a tensor; into a sharded one this rank's part."""
    everything = local_shards(whole).kind.whole
    for box in local_shards(tensor).boxes:
        shard_view(tensor, box).copy_(whole.detach()[box.within(everything)])  # `shard_view` is no part of a graph
