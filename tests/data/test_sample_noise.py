"""Draws of a fetch are keyed, and leave the generators of the process unchanged."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from lockstep.data.noise import drop_second_normal, keyed_generators, uniform, use_epoch
from lockstep.distributed import generators


def _draws() -> tuple[float, float, float]:
    return random.random(), np.random.random(), float(torch.rand(()))


def _draws_of(key: int) -> tuple[float, float, float]:
    with keyed_generators(key):
        return _draws()


def test_keyed_generators_draw_the_same_for_a_key_and_differ_between_keys() -> None:
    keys = [0, 1, 2**62 + 3]
    assert _draws_of(1) == _draws_of(1)
    for draws in zip(*map(_draws_of, keys), strict=True):  # of Python, NumPy and torch
        assert len(set(draws)) == len(keys)


def _fail_with_key(key: int) -> None:
    with keyed_generators(key):
        _draws()
        raise KeyError


def test_keyed_generators_are_restored_after_nesting_and_errors() -> None:
    with keyed_generators(1):
        expected = [_draws(), _draws()]
    with keyed_generators(1):
        first = _draws()
        with pytest.raises(KeyError):
            _fail_with_key(2)
        assert [first, _draws()] == expected


def test_normal_numbers_after_a_fetch_are_those_with_workers() -> None:
    def after(fetch: Callable[[], object]) -> list[float]:
        np.random.seed(3)
        np.random.normal()
        fetch()
        return [float(np.random.normal()) for _ in range(3)]

    assert after(lambda: _draws_of(1)) == after(drop_second_normal)


def test_registered_generators_are_keyed_in_a_fetch_and_stay_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are fetched ahead of updates and in workers: what is saved must not depend on how far ahead."""
    mine = {"python": random.Random(1), "numpy": np.random.default_rng(1), "torch": torch.Generator().manual_seed(1)}
    monkeypatch.setattr(generators, "_registered", mine)

    def draws() -> list[float]:
        return [
            mine["python"].random(),
            float(mine["numpy"].random()),
            float(torch.rand((), generator=mine["torch"])),
        ]

    with keyed_generators(5):
        first = draws()
    draws()
    with keyed_generators(5):
        assert draws() == first
    with keyed_generators(6):
        assert all(map(float.__ne__, draws(), first))


def test_noise_depends_only_on_epoch_and_sample() -> None:
    use_epoch(5)
    noise = uniform(np.arange(10), 3)
    assert noise.shape == (10, 3)
    assert ((noise >= 0) & (noise < 1)).all()
    assert np.array_equal(uniform(np.array([7, 2]), 3), noise[[7, 2]])
    assert np.array_equal(uniform(np.array([4]), 2)[0], noise[4, :2])
    use_epoch(6)
    assert (uniform(np.arange(10), 3) != noise).all()
