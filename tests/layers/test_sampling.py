"""Of some tests `make test` runs a part of the rows; the table that lists them is true."""

from __future__ import annotations

import ast
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.sampling import ROWS, spread

TESTS = Path(__file__).parent.parent


@pytest.mark.parametrize("file", ROWS)
def test_the_table_names_tests_that_exist(file: str) -> None:
    functions = {node.name for node in ast.parse((TESTS / file).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert {f"test_{name}" for name in ROWS[file]} <= functions


@given(length=st.integers(0, 300), number=st.integers(0, 300))
def test_rows_are_spread_evenly(length: int, number: int) -> None:
    places = sorted(spread(range(length), number))
    assert len(places) == min(length, number)
    assert all(0 <= place < length for place in places)
    gaps = [after - before for before, after in pairwise(places)]
    assert not gaps or max(gaps) - min(gaps) <= 1
