"""A sum in fixed order: however the terms are distributed, the same pairs are added."""

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lockstep.plan.summation import FixedSum, Node, most_held, nodes_of, total

TERMS = st.integers(1, 70)


@st.composite
def splits(draw: Any) -> tuple[int, list[tuple[int, int]]]:
    """Return a number of terms, and the contiguous ranges that holders have, some of them empty."""
    terms = draw(TERMS)
    cuts = sorted(draw(st.lists(st.integers(0, terms), max_size=8)))
    return terms, list(zip([0, *cuts], [*cuts, terms], strict=True))


def added(terms: int, parts: list[tuple[int, int]], values: list[Any], add: Any) -> Any:
    """Return the sum: each holder adds its pairs, then the remaining nodes are added."""
    nodes: list[Node] = []
    left: list[Any] = []
    for first, stop in parts:
        own: FixedSum[Any] = FixedSum(terms, add)
        for term in range(first, stop):
            own.put(Node(0, term), values[term])
        assert own.nodes == nodes_of(first, stop, terms)
        nodes += own.nodes
        left += own.values
    return total(nodes, left, terms, add)


@given(splits())
def test_any_split_adds_the_same_pairs(split):
    terms, parts = split
    names = list(range(terms))
    pair = lambda left, right: (left, right)  # noqa: E731
    assert added(terms, parts, names, pair) == added(terms, [(0, terms)], names, pair)


@given(splits(), st.integers(0, 2**32 - 1))
def test_any_split_is_bitwise_identical(split, seed):
    terms, parts = split
    draws = np.random.default_rng(seed)
    values = list((draws.standard_normal((terms, 3)) * 10.0 ** draws.integers(-9, 9, (terms, 1))).astype(np.float32))
    add = lambda left, right: left + right  # noqa: E731
    assert added(terms, parts, values, add).tobytes() == added(terms, [(0, terms)], values, add).tobytes()


def test_another_order_of_additions_gives_another_result():
    """The test above would fail for it."""
    values = [np.float32(value) for value in (1.0, 1e8, -1e8, 3.0)]
    tree = total([Node(0, term) for term in range(4)], values, 4, lambda left, right: left + right)
    assert tree != values[0] + (values[1] + values[2]) + values[3]


def test_five_terms():
    assert added(5, [(0, 3), (3, 5)], list("abcde"), lambda left, right: f"({left}{right})") == "(((ab)(cd))e)"
    assert nodes_of(0, 3, 5) == [(1, 0), (0, 2)]
    assert nodes_of(3, 5, 5) == [(0, 3), (2, 1)]


@given(TERMS)
def test_the_values_held_at_a_time_grow_with_the_logarithm(terms):
    assert most_held(0, terms, terms) <= terms.bit_length() + 1
    assert len(nodes_of(0, terms, terms)) == 1
