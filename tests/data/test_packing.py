"""Documents are packed whole and tightly."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.tokens import pack


def offsets_of(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def best_fit_one_by_one(lengths: list[int], capacity: int) -> int:
    """Return the number of samples of best-fit decreasing, document by document."""
    filled: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [number for number, used in enumerate(filled) if used + length <= capacity]
        if fitting:
            filled[max(fitting, key=lambda number: filled[number])] += length
        else:
            filled.append(length)
    return len(filled)


@given(st.lists(st.integers(0, 100), max_size=60), st.integers(1, 40))
def test_every_token_is_in_one_sample_and_no_sample_overflows(lengths, capacity):
    offsets = offsets_of(lengths)
    packing = pack(offsets, capacity)
    hits = np.zeros(offsets[-1], dtype=int)
    for start, length in zip(packing.starts, packing.lengths, strict=True):
        hits[start : start + length] += 1
    assert (hits == 1).all()
    for first, stop in zip(packing.bounds[:-1], packing.bounds[1:], strict=True):
        assert 0 < packing.lengths[first:stop].sum() <= capacity


@given(st.lists(st.integers(1, 30), max_size=80))
def test_it_packs_as_tightly_as_document_by_document(lengths):
    assert pack(offsets_of(lengths), 30).samples == best_fit_one_by_one(lengths, 30)


def test_only_documents_longer_than_a_sample_are_cut():
    packing = pack(offsets_of([5, 23, 10, 4]), 10)
    pieces = sorted(zip(packing.starts.tolist(), packing.lengths.tolist(), strict=True))
    assert pieces == [(0, 5), (5, 10), (15, 10), (25, 3), (28, 10), (38, 4)]


def test_almost_no_padding_for_documents_of_natural_lengths():
    lengths = np.exp(np.random.default_rng(0).normal(5.5, 1.2, 50_000)).astype(int) + 1
    packing = pack(offsets_of(lengths.tolist()), 1024)
    assert packing.padding < 0.001
    assert packing.lengths.sum() == lengths.sum()
