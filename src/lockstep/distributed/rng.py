"""Seeds, and generators keyed for one forward.

Dropout differs between data ranks, micro-batches and steps, and is the same when a step is repeated; in evaluation it
differs between sets and batches, and is the same in every evaluation.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from lockstep.core.keys import key

if TYPE_CHECKING:
    from lockstep.core.records import GlobalBatch


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, on all devices."""
    seed_host(seed)
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # without the notes on seeds that torch keeps for devices that aren't there: 5 ms
        torch.default_generator.manual_seed(seed)


def seed_host(seed: int) -> None:
    """Seed Python's and NumPy's generators: 5.5 us; with more than 32 bits, NumPy's would already take 8 us."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


class KeyedDraws:
    """Seeds Python's, NumPy's and torch's generators before each forward by (seed, step, data rank, micro-batch).

    Args:
        data_rank: 0 if micro-batches are numbered through all ranks.
        part: This rank's part of the sequences, if they are sharded; else 0.
        first_of: Returns the number of this rank's first micro-batch in a step of N samples; None: it counts from 0.
    """

    def __init__(
        self,
        seed: int,
        data_rank: int,
        device: torch.device,
        part: int = 0,
        first_of: Callable[[int], int] | None = None,
    ) -> None:
        self._seed = seed
        self._part: tuple[str | int, ...] = ("part", part) if part else ()
        self._data_rank = data_rank
        self._first_of = first_of
        self._generators = [torch.default_generator]
        if device.type != "cpu":
            self._generators.append(torch.get_device_module(device).default_generators[device.index or 0])

    def __call__(self, batch: GlobalBatch, micro_batch: int, stage: int) -> None:
        """Seed a forward of this rank's `micro_batch`; a pipeline's stages draw different numbers."""
        if self._first_of is not None:
            micro_batch += self._first_of(batch.samples)
        self._seed_with("forward", batch.step, self._data_rank, micro_batch, *((stage,) if stage else ()))

    def set_for_evaluation(self, name: str, first_sample: int, stage: int) -> None:
        """Seed an evaluation's forward by set, index of the batch's first sample, and first stage."""
        self._seed_with("evaluation", name, first_sample, stage)

    def _seed_with(self, *parts: int | str) -> None:
        number = key(self._seed, *parts, *self._part) >> 1
        seed_host(number)
        for generator in self._generators:
            generator.manual_seed(number)
