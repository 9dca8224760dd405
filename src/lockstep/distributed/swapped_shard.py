"""A shard whose elements are in a file, on NVMe: another library moves them to memory where it needs them.

read     whenever `memory` is asked for: a copy, not the live values
write    goes to the file
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lockstep.distributed.shard_boxes import FlatShard

_FP32_BYTES = 4


class SwappedShard(FlatShard):
    """The range of fp32 elements that a rank holds of a flattened tensor, in a file of its own.

    Attributes:
        first: The index of the first element in the file.
    """

    def __init__(
        self, file: Path, first: int, elements: int, start: int, shape: Sequence[int], device: torch.device, length: int
    ) -> None:
        super().__init__(torch.empty(0), start, shape, device, length)
        self.file = file
        self.first = first
        self._elements = elements

    @property
    def elements(self) -> int:
        return self._elements

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32

    def to_local(self) -> Tensor:
        return torch.from_numpy(np.fromfile(self.file, np.float32, self._elements, offset=_FP32_BYTES * self.first))

    @contextmanager
    def in_memory(self) -> Iterator[FlatShard]:
        held = FlatShard(self.to_local(), self.start, self.shape, self.device, self.length)
        yield held
        self.write(held.memory)

    def write(self, values: Tensor) -> None:
        data = values.detach().to("cpu", torch.float32).expand(self._elements).contiguous().numpy().data
        with self.file.open("r+b", buffering=0) as file:
            file.seek(_FP32_BYTES * self.first)
            file.write(data.cast("B"))
            os.fsync(file.fileno())
