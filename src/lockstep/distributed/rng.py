"""Seeds, and generators keyed for one forward.

Initialization and order are the same on all ranks. The numbers that a forward draws (dropout) differ between data
ranks, micro-batches and updates, and are the same again when the update is repeated. Those of an evaluation's forward
differ between sets and batches, and are the same in every evaluation.
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
    _seed_host(seed)
    if torch.accelerator.is_available():
        torch.manual_seed(seed)
    else:  # without the notes on seeds that torch keeps for devices that aren't there: 5 ms
        torch.default_generator.manual_seed(seed)


def _seed_host(seed: int) -> None:
    """Seed Python's and NumPy's generators: 5.5 us; with more than 32 bits, NumPy's alone would take 8 us."""
    random.seed(seed)
    np.random.seed(seed % 2**32)


class KeyedDraws:
    """Sets all generators before each forward to a key of (seed, update, data rank, micro-batch).

    Those are Python's, NumPy's and torch's, on the CPU and on the device.

    Args:
        data_rank: 0 if micro-batches are numbered through all ranks.
        part: The part of the sequences that this rank has, if they are divided; else 0.
        first_of: Returns the number of this rank's first micro-batch in an update of N samples; None: each rank counts
            its own from 0.
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
        """Key the draws of a forward of this rank's `micro_batch`; a pipeline's stages draw different numbers."""
        if self._first_of is not None:
            micro_batch += self._first_of(batch.samples)
        self._seed_with("forward", batch.step, self._data_rank, micro_batch, *((stage,) if stage else ()))

    def set_for_evaluation(self, name: str, first_sample: int, stage: int) -> None:
        """Set the generators to the key of an evaluation's forward: the same where ranks have the same batches.

        Args:
            name: The evaluation set's.
            first_sample: The place in the set of the batch's first sample.
            stage: The first of this rank's in a pipeline.
        """
        self._seed_with("evaluation", name, first_sample, stage)

    def _seed_with(self, *parts: int | str) -> None:
        number = key(self._seed, *parts, *self._part) >> 1
        _seed_host(number)
        for generator in self._generators:
            generator.manual_seed(number)
