"""The order of an epoch is a fixed, uniform, keyed permutation."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.order import SampleOrder


def epoch_order(samples: int, seed: int, epoch: int) -> np.ndarray:
    return SampleOrder(samples, seed).indices(epoch, np.arange(samples))


@given(st.integers(1, 3000), st.integers(0, 2**63 - 1), st.integers(0, 1000))
def test_every_sample_occurs_once_an_epoch(samples: int, seed: int, epoch: int) -> None:
    assert np.array_equal(np.sort(epoch_order(samples, seed, epoch)), np.arange(samples))


@given(st.integers(1, 2**60), st.integers(0, 2**63 - 1), st.lists(st.integers(0, 2**60), min_size=1, max_size=50))
def test_indices_of_huge_datasets_are_in_range_and_distinct(samples: int, seed: int, numbers: list[int]) -> None:
    positions = np.array(sorted({number % samples for number in numbers}))
    indices = SampleOrder(samples, seed).indices(0, positions)
    assert indices.dtype == np.int64
    assert indices.min() >= 0
    assert indices.max() < samples
    assert len(np.unique(indices)) == len(positions)


def test_the_order_is_the_same_in_every_version() -> None:
    assert SampleOrder(10, 42).indices(0, np.arange(10)).tolist() == [5, 2, 7, 6, 0, 9, 4, 1, 8, 3]
    assert SampleOrder(10, 42).indices(1, np.arange(10)).tolist() == [5, 3, 8, 2, 0, 7, 1, 4, 6, 9]
    assert SampleOrder(1_000_003, 7).indices(3, np.array([0, 1, 999_999, 1_000_002])).tolist() == [
        208824,
        660048,
        722348,
        499177,
    ]


@given(st.integers(2, 500), st.data())
def test_a_position_is_the_same_alone_and_among_others(samples: int, data: st.DataObject) -> None:
    position = data.draw(st.integers(0, samples - 1))
    alone = SampleOrder(samples, 5).indices(2, np.array([position]))
    assert alone[0] == epoch_order(samples, 5, 2)[position]


@pytest.mark.parametrize("samples", [2, 3, 5, 8, 12, 50])
def test_each_sample_is_as_likely_at_each_position(samples: int) -> None:
    epochs = 4000
    hits = np.zeros((samples, samples))
    for epoch in range(epochs):
        hits[np.arange(samples), epoch_order(samples, 3, epoch)] += 1
    expected = epochs / samples
    statistic = ((hits - expected) ** 2 / expected).sum()
    freedom = (samples - 1) ** 2
    assert abs(statistic - freedom) < 5 * np.sqrt(2 * freedom)


def test_neighbors_in_the_order_are_not_neighbors_in_the_dataset() -> None:
    order = epoch_order(100_000, 1, 0)
    steps = np.diff(order)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert np.mean(np.abs(steps) < 10) < 0.001
    assert abs(np.mean(steps > 0) - 0.5) < 0.01


def test_seeds_and_epochs_give_other_orders() -> None:
    orders = [epoch_order(1000, seed, epoch) for seed, epoch in [(0, 0), (0, 1), (1, 0), (1, 1)]]
    for number, first in enumerate(orders):
        for second in orders[number + 1 :]:
            assert np.mean(first == second) < 0.02


def test_without_shuffling_the_order_is_the_identity() -> None:
    assert SampleOrder(7, 42, shuffle=False).indices(3, np.arange(7)).tolist() == list(range(7))
