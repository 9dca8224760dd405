"""Initial values that are known by a rule, of which a rank draws only the elements that it holds.

rule of a parameter --> InitialValue --> put: for each box of the tensor that this rank holds
                                           consecutive elements     drawn into its memory
                                           others (columns)         the whole tensor is drawn, and freed

A normal value is bitwise `torch.empty(shape).normal_(mean, std, generator=g)` of torch's generator on a CPU. Each
element takes one 32-bit draw, in blocks of 16 (Box and Muller); if the number of elements isn't divisible by 16, the
last 16 are drawn again at the end. A rank passes over the draws before its elements, some 0.2 G of them a second.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Protocol

import torch

from lockstep.distributed.shard_boxes import copy_from_full, local_shards, set_in_memory, shard_view

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.distributed.shard_boxes import Box

Shape = tuple[int, ...]

BLOCK = 16
"""Elements that torch draws together; it draws smaller tensors in another way."""
_CHUNK = 2**16
"""Elements that are drawn at once: few enough for the cache, and a multiple of `BLOCK`."""


def draws_of(elements: int) -> int:
    """Return the number of draws of a normal tensor of at least `BLOCK` elements."""
    return elements + (BLOCK if elements % BLOCK else 0)


class InitialValue(Protocol):
    """The initial value of one tensor, in fp32."""

    @property
    def shape(self) -> Shape:
        """Shape of the whole tensor."""

    def fill(self, target: Tensor, start: int) -> None:
        """Fill a contiguous fp32 tensor with elements from `start` of the flattened value."""


@dataclass(frozen=True, slots=True)
class Constant:
    """The same value for all elements."""

    shape: Shape
    value: float

    def fill(self, target: Tensor, start: int) -> None:
        target.fill_(self.value)


@dataclass(frozen=True, slots=True)
class Normal:
    """The draws of a CPU generator from a normal distribution.

    Attributes:
        seed: Seed of the generator.
        skip: Draws that were made before; 0 for tensors of less than 16 elements.
    """

    shape: Shape
    mean: float
    std: float
    seed: int
    skip: int = 0

    def fill(self, target: Tensor, start: int) -> None:
        elements, stop = prod(self.shape), start + target.numel()
        generator = torch.Generator().manual_seed(self.seed)

        def draw(first: int, length: int) -> None:
            """Draw the elements from `first` on; keep those of the target."""
            drawn = torch.empty(length).normal_(self.mean, self.std, generator=generator)
            begin, end = max(first, start), min(first + length, stop)
            target.view(-1)[begin - start : end - start].copy_(drawn[begin - first : end - first])

        _pass_over(generator, self.skip)
        if elements < BLOCK:
            draw(0, elements)
            return
        whole_blocks, passed = elements // BLOCK * BLOCK, start // BLOCK * BLOCK
        _pass_over(generator, passed)
        while passed < min(stop, whole_blocks):
            length = min(_CHUNK, whole_blocks - passed)
            draw(passed, length)
            passed += length
        if elements % BLOCK and stop > elements - BLOCK:
            _pass_over(generator, elements - passed)
            draw(elements - BLOCK, BLOCK)


def _pass_over(generator: torch.Generator, draws: int) -> None:
    unread = torch.empty(_CHUNK, dtype=torch.int32)
    for passed in range(0, draws, _CHUNK):
        unread[: draws - passed].random_(generator=generator)


@dataclass(frozen=True, slots=True)
class ConstantRow:
    """Another value, but for one row, whose elements are the same: the padding of an embedding."""

    others: InitialValue
    row: int
    value: float

    @property
    def shape(self) -> Shape:
        return self.others.shape

    def fill(self, target: Tensor, start: int) -> None:
        self.others.fill(target, start)
        length = prod(self.shape[1:])
        first = self.row * length - start
        target.view(-1)[max(first, 0) : max(first + length, 0)] = self.value


@dataclass(frozen=True, slots=True)
class Known:
    """The value of a tensor that exists, in memory or mapped from a file."""

    tensor: Tensor

    @property
    def shape(self) -> Shape:
        return tuple(self.tensor.shape)

    def fill(self, target: Tensor, start: int) -> None:
        target.view(-1).copy_(self.tensor.detach().reshape(-1)[start : start + target.numel()])


@torch.no_grad()
def put(tensor: Tensor, value: InitialValue) -> None:
    """Set a tensor, or this rank's part of a sharded one, to its initial value."""
    if isinstance(value, Known):
        copy_from_full(tensor, value.tensor)
        return
    with set_in_memory(tensor) as held:
        _put(held, value)


def _put(tensor: Tensor, value: InitialValue) -> None:
    whole: Tensor | None = None
    for box in local_shards(tensor).boxes:
        target, start = shard_view(tensor, box), _first_element(box, value.shape)
        if start is not None and target.is_contiguous() and target.dtype is torch.float32:
            value.fill(target, start)
            continue
        if whole is None:
            whole = torch.empty(value.shape)
            value.fill(whole, 0)
        target.copy_(whole[box.within(local_shards(whole).kind.whole)])


def _first_element(box: Box, shape: Shape) -> int | None:
    """Return the flat index of a box's first element if its elements follow each other in a tensor; None: they don't.

    They do if all dims before the first one with more than one index have one, and all dims behind it are whole.
    """
    dim = next((dim for dim, size in enumerate(box.sizes) if size > 1), len(shape))
    if any(size != length for size, length in zip(box.sizes[dim + 1 :], shape[dim + 1 :], strict=True)):
        return None
    start = 0
    for offset, length in zip(box.offsets, shape, strict=True):
        start = start * length + offset
    return start
