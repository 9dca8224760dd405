"""A dataset that draws samples by weight, such as rare classes more often.

    weights       0.1  0.6   0.1  0.2       on a line of the length of their sum
    draws          |----|----|----|---      evenly spaced, from a start that is keyed by the epoch
    samples            0    1    1    3     in the order of the run, which shuffles the draws

A sample is drawn as often as torch's WeightedRandomSampler (with replacement) draws it on average, give or take one
(systematic sampling: Madow and Madow, Ann. Math. Statist. 15, 1944). Draws depend only on seed, epoch and position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from lockstep.core.errors import ConfigError
from lockstep.data import noise

_START = np.zeros(1, np.int64)


class WeightedDataset(torch.utils.data.Dataset[Any]):
    """A map-style dataset that returns the samples of another one as often as their weights say. Raises ConfigError.

    Args:
        weights: One for each sample, of any sum; 0: it is never drawn.
        samples: Number of draws in an epoch; None: as many as the dataset has samples.
    """

    def __init__(self, dataset: Any, weights: Sequence[float] | torch.Tensor, samples: int | None = None) -> None:
        self.dataset = dataset
        self.weights = np.asarray(weights, np.float64)
        self._samples = len(dataset) if samples is None else samples
        if self.weights.shape != (len(dataset),):
            raise ConfigError(f"{list(self.weights.shape)} weights for {len(dataset)} samples; give one each")
        if not (np.isfinite(self.weights).all() and (self.weights >= 0).all() and self.weights.any()):
            raise ConfigError("weights must be finite and not negative, and one at least above 0")
        self._ends = np.cumsum(self.weights)
        self._last = int(np.flatnonzero(self.weights)[-1])

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, draw: int) -> Any:
        place = (draw + noise.uniform(_START, 1)[0, 0]) / self._samples * self._ends[-1]
        return self.dataset[min(int(np.searchsorted(self._ends, place, side="right")), self._last)]
