"""A collective that a rank has called and that isn't complete, by torch's flight record."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class PendingCollective(NamedTuple):
    """A collective that isn't complete.

    Attributes:
        number: Of the collectives of its group, from 1.
        group: The name of the process group.
        ranks: The ranks of the group.
        sizes: The shapes of its inputs.
        on_device: Whether a device makes it, and the host doesn't wait for it, as under NCCL.
        is_started: Whether it is known that the device has started it (NCCL: with `TORCH_NCCL_ENABLE_TIMING`).
    """

    operation: str
    number: int
    group: str
    ranks: Sequence[int]
    sizes: Sequence[Sequence[int]]
    on_device: bool
    is_started: bool

    def __str__(self) -> str:
        elements = sum(math.prod(size) for size in self.sizes)
        size = f" ({elements:,} elements)" if elements else ""
        started = ", started on the device," if self.is_started else ""
        return f"{self.operation} {self.number:,} of group {self.group}{size}{started}"

    @property
    def call(self) -> tuple[str, int, str]:
        """The operation, number and group: the same on all ranks of the group."""
        return self.operation, self.number, self.group
