"""Seeds, and generators keyed for one forward.

Initialisation and order are alike on all ranks; what a forward draws (dropout) is distinct for each data rank,
micro-batch and update, and is the same again when the update is run again.
"""

from __future__ import annotations

import random

import numpy as np
import torch

from lockstep.core.keys import key


def seed_everything(seed: int) -> None:
    """Seeds Python's, NumPy's and torch's generators, on all devices."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


class KeyedDraws:
    """Sets the device's generator before each forward to a key of (seed, update, data rank, micro-batch).

    Args:
        data_rank: 0 if micro-batches are numbered through all ranks.
        part: of the sequences, that this rank keeps alone.
    """

    def __init__(self, seed: int, data_rank: int, device: torch.device, part: int = 0) -> None:
        self._seed = seed
        self._part: tuple[str | int, ...] = ("part", part) if part else ()
        self._data_rank = data_rank
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index or 0])

    def set(self, step: int, micro_batch: int, stage: int = 0) -> None:
        """`stage`: of a pipeline; what it draws is not what another one does."""
        place = (step, self._data_rank, micro_batch, *((stage,) if stage else ()))
        number = key(self._seed, "forward", *place, *self._part) >> 1
        for generator in self._generators:
            generator.manual_seed(number)
