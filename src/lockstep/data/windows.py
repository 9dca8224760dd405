"""A stream of tokens as samples of a fixed length, read a whole batch at a time.

stream    t0 t1 t2 t3 t4 t5 t6 t7 t8 ...
sample 0  t0 t1 t2 t3 t4                    length 4: four inputs, and the four tokens that follow them
sample 1              t4 t5 t6 t7 t8        windows meet in one token, so that each token is a target once
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.core.errors import ConfigError
from lockstep.core.records import Batch, DataFacts
from lockstep.data.order import Indices

Tokens = NDArray[Any]  # of an unsigned integer type


def cut_windows(tokens: Tokens, length: int, name: str) -> Tokens:
    """Return a view [samples, length + 1] of the stream [tokens], without the rest that doesn't fill a window.

    Raises ConfigError if the stream is shorter than a window.
    """
    if len(tokens) <= length:
        most = max(0, len(tokens) - 1)
        raise ConfigError(
            f"{name} has {len(tokens)} tokens, too few for a sample of length {length}; set {most} at most"
        )
    samples = (len(tokens) - 1) // length
    step = tokens.strides[0]
    return np.lib.stride_tricks.as_strided(tokens, (samples, length + 1), (length * step, step), writeable=False)


class WindowSource:
    """Windows [samples, length + 1] of a stream, from `cut_windows`; inputs and targets are [samples, length] int64.

    If `aligned`, for models of the transformers library, the inputs are `input_ids`, and the targets the same, which
    the objective shifts. Otherwise the inputs are `tokens`, and the targets the next tokens.
    """

    draws = False

    def __init__(
        self, windows: Tokens, fingerprint: str, *, aligned: bool, vocabulary: int, bytes_per_token: float
    ) -> None:
        self._windows = windows
        self._aligned = aligned
        samples, width = windows.shape
        self.facts = DataFacts(samples, width - 1, vocabulary=vocabulary, bytes_per_token=bytes_per_token)
        self.fingerprint = fingerprint

    def fetch(self, indices: Indices) -> Batch:
        rows = self._windows[indices]  # converted twice, so that inputs and targets are contiguous
        samples, width = rows.shape
        inputs = torch.from_numpy(rows[:, :-1].astype(np.int64))
        if self._aligned:
            return Batch({"input_ids": inputs}, inputs, samples, samples * (width - 1))
        targets = torch.from_numpy(rows[:, 1:].astype(np.int64))
        return Batch({"tokens": inputs}, targets, samples, samples * (width - 1))
