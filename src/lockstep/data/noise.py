"""The random numbers that a fetch draws, and their keys.

    noise of a sample       (key of the epoch, index of the sample, which draw)     uniform(indices, draws)
    a user's own code       Python's, NumPy's and torch's generators, seeded        keyed_generators(key)
                            for each micro-batch and given back as they were

The first is a function of the sample, so that augmentation and masking are the same however an update is split into
ranks and micro-batches; Lockstep's own sources draw so. User code draws from the process' generators:
its draws depend on the split, but never on what was drawn before, nor on which process fetches.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.data.order import Indices, mix

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: SplitMix64's step from draw to draw
_epoch_key = 0


def use_epoch(key: int) -> None:
    """Make this process draw the noise of the epoch that `key` stands for."""
    global _epoch_key
    _epoch_key = key


def uniform(indices: Indices, draws: int) -> NDArray[np.float64]:
    """Return [samples, draws] in [0, 1), a function of the epoch's key and each sample's index alone."""
    streams = mix(indices.astype(np.uint64) * _GOLDEN + np.uint64(_epoch_key))
    counters = np.arange(1, draws + 1, dtype=np.uint64) * _GOLDEN
    bits = mix(streams[:, None] + counters)
    bits >>= np.uint64(11)
    return bits.astype(np.float64) * np.float64(2.0**-53)


@contextmanager
def keyed_generators(key: int) -> Iterator[None]:
    """Start the process' CPU generators from `key` within the block; afterwards they are as they were before."""
    python, numpy, pytorch = random.getstate(), np.random.get_state(), torch.random.get_rng_state()
    random.seed(key)
    np.random.seed([key & 0xFFFFFFFF, key >> 32])
    torch.default_generator.manual_seed(key)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.random.set_rng_state(pytorch)
