"""scikit-learn's handwritten digits: 1,797 images of 8 x 8 pixels, every 5th of them held out."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.config.schema import Digits
from lockstep.core.distribution import pip_install
from lockstep.core.errors import ConfigError
from lockstep.core.records import Batch, DataFacts
from lockstep.data import noise
from lockstep.data.order import Indices, fingerprint

_HELD_OUT_EVERY = 5
_SIDE = 8


class DigitsSource:
    """Images [samples, 1, 8, 8] in [0, 1], shifted at random by up to `shift` pixels; the targets are the digits.

    If `aligned`, for models of the transformers library, they are called `pixel_values`, otherwise `images`.
    """

    def __init__(self, section: Digits, *, aligned: bool = False) -> None:
        self._name = "pixel_values" if aligned else "images"
        images, digits = _load()
        held_out = np.arange(len(images)) % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1
        chosen = held_out if section.split == "held-out" else ~held_out
        self._shift = section.shift
        self.draws = section.shift > 0
        self._images = np.pad(images[chosen], ((0, 0), (section.shift,) * 2, (section.shift,) * 2))
        self._digits = torch.from_numpy(digits[chosen])
        self.facts = DataFacts(int(chosen.sum()), None, classes=10)
        self.fingerprint = fingerprint("digits", section.shift, images[chosen], digits[chosen])

    def fetch(self, indices: Indices) -> Batch:
        images = self._shifted(indices) if self._shift else self._images[indices]
        targets = self._digits[torch.from_numpy(indices)]
        return Batch({self._name: torch.from_numpy(images).unsqueeze(1)}, targets, len(indices), len(indices))

    def _shifted(self, indices: Indices) -> NDArray[np.float32]:
        corners = (noise.uniform(indices, 2) * (2 * self._shift + 1)).astype(np.int64)
        rows = corners[:, :1] + np.arange(_SIDE)
        columns = corners[:, 1:] + np.arange(_SIDE)
        crops: NDArray[np.float32] = self._images[indices[:, None, None], rows[:, :, None], columns[:, None, :]]
        return crops


def _load() -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    package = importlib.util.find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise ConfigError(f"data kind digits needs scikit-learn, which is not installed: {pip_install('digits')}")
    file = Path(package.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    if file.exists():  # importing the package takes two seconds on each rank
        rows = _rows(file)
        pixels, digits = rows[:, :-1], rows[:, -1]
    else:
        from sklearn.datasets import load_digits

        pixels, digits = load_digits(return_X_y=True)
    return (pixels.reshape(-1, _SIDE, _SIDE) / 16.0).astype(np.float32), digits.astype(np.int64)


@cache
def _rows(file: Path) -> NDArray[np.float64]:
    return np.loadtxt(file, delimiter=",")
