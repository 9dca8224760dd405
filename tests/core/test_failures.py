"""Tests tell failures apart: the helpers of `kit.failures` notice another value, order, key or kind."""

from __future__ import annotations

import pytest
from kit.failures import fails, gives

from lockstep.core.errors import ConfigError, Problem, RunFailed
from lockstep.core.failure_kinds import FailureKind


def test_values_are_whole_and_in_order_on_one_line() -> None:
    text = "batch.micro_size is 4 instead of 8, in /runs/a.\nstep 12"
    assert gives(text, "batch.micro_size", 4, 8, "/runs/a")
    assert gives(text, "step 12")
    for values in ((8, 4), (1,), (2,), ("micro_size",), ("/runs",), (4, 12)):
        assert not gives(text, *values), values
    assert not gives("1.5 of 2,000", 5)
    assert not gives("1.5 of 2,000", 2)
    assert not gives("by -40.0 s", "40.0 s")
    assert not gives("lr 1e-5", 5)


@pytest.mark.parametrize(
    "failure", [RunFailed("lr 0.1"), ConfigError(Problem("", "optim.lr", "0.2")), ConfigError(Problem("", "lr", "0.1"))]
)
def test_another_type_value_or_key_is_noticed(failure: Exception) -> None:
    with pytest.raises((AssertionError, RunFailed)), fails(ConfigError, 0.1, key="optim.lr"):
        raise failure


def test_another_kind_is_noticed() -> None:
    with pytest.raises(AssertionError), fails(RunFailed, kind=FailureKind.SAMPLE):
        raise RunFailed("sample 3")
    with fails(RunFailed, 3, kind=FailureKind.SAMPLE):
        raise RunFailed("sample 3", kind=FailureKind.SAMPLE)
