"""The random numbers that a fetch draws, and their keys.

    noise of a sample       keyed by epoch, sample index and number of the draw     uniform(indices, draws)
    user code               Python's, NumPy's and torch's generators, and those     keyed_generators(key)
                            that it has registered: seeded for each micro-batch
                            and restored afterwards

So augmentation and masking of Lockstep's own sources don't depend on the split into ranks and micro-batches. User
code's draws do, but not on earlier draws or the process that fetches.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.random.mtrand import get_bit_generator, set_bit_generator
from numpy.typing import NDArray

from lockstep.data.order import Indices, mix
from lockstep.distributed import generators
from lockstep.distributed.rng import seed_host

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: SplitMix64's step from draw to draw
_epoch_key = _seed = 0


class _OfFetch(np.random.MT19937):
    """NumPy's generator in a fetch: to exchange generators takes 0.5 us, to copy a state 100 us."""


_numpy = _OfFetch(0)


def use_epoch(key: int) -> None:
    """Make `uniform` draw the noise of the epoch with this key, in this process."""
    global _epoch_key
    _epoch_key = key


def uniform(indices: Indices, draws: int) -> NDArray[np.float64]:
    """Return [samples, draws] in [0, 1), a function of only the epoch's key and each sample's index."""
    streams = mix(indices.astype(np.uint64) * _GOLDEN + np.uint64(_epoch_key))
    counters = np.arange(1, draws + 1, dtype=np.uint64) * _GOLDEN
    bits = mix(streams[:, None] + counters)
    bits >>= np.uint64(11)
    return bits.astype(np.float64) * np.float64(2.0**-53)


@contextmanager
def keyed_generators(key: int) -> Iterator[None]:
    """Seed the CPU generators of the process from `key` within the block; restore them afterwards."""
    states = seed_generators(key)
    try:
        yield
    finally:
        restore_generators(states)


def seed_generators(key: int) -> tuple[Any, ...]:
    """Seed them, and return what `restore_generators` needs; NumPy's drops the second number of a pair of normals."""
    outer = get_bit_generator()
    states = _seed, random.getstate(), outer, torch.random.get_rng_state(), generators.on_host()
    set_bit_generator(_OfFetch(0) if isinstance(outer, _OfFetch) else _numpy)
    _seed_with(key)
    return states


def seed_again() -> None:
    """Let the fetch in progress draw the same numbers again."""
    _seed_with(_seed)


def restore_generators(states: tuple[Any, ...]) -> None:
    """Restore what `seed_generators` has returned."""
    global _seed
    _seed, python, numpy, pytorch, registered = states
    random.setstate(python)
    set_bit_generator(numpy)
    torch.random.set_rng_state(pytorch)
    generators.put_on_host(registered)


def _seed_with(key: int) -> None:
    global _seed
    _seed = key
    seed_host(key)
    torch.default_generator.manual_seed(key)
    generators.seed_on_host(key)


def drop_second_normal() -> None:
    """Do to this process's generators what a fetch in it does: with workers, the run is the same."""
    set_bit_generator(get_bit_generator())
