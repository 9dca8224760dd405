"""Verification finds faults: each of these bugs is injected into a run, and must be found and named."""

from __future__ import annotations

import pytest
from kit import small
from kit.faults import FAULTS, PUBLISHING, STOPPING
from kit.proofs import text, with_faults

from lockstep.assembly.user_objects import UserObjects
from lockstep.proof.rows import Row, explanation

INJECTED = {**FAULTS, **STOPPING, **PUBLISHING}

FOUND = {
    "a mean of means": (1, "embedding.weight"),
    "a missing division by ranks": (1, "embedding.weight"),
    "a double reduction": (1, "embedding.weight"),
    "one swapped sample": (1, "embedding.weight"),
    "a cursor off by one": (1, "embedding.weight"),
    "a clip norm of one rank": (1, None),
    "a stale moment": (3, "embedding.weight"),
    "an unsynchronized tied weight": (1, "embedding.weight"),
    "a tensor lost when published": (4, None),
    "a tensor published stale": (4, "blocks.0.attention_norm.weight"),
}
"""Step and first parameter, in the run with two micro-batches."""


def rows(fault: str | None) -> list[Row]:
    """Return the rows of this fault, or of none: as configured, accumulated, under SGD."""
    return with_faults(text(7), [INJECTED.get(fault or "")])[0]


def test_every_fault_has_an_expected_finding() -> None:
    assert set(FOUND) == set(INJECTED)


@pytest.mark.drill
def test_without_a_fault_every_run_passes() -> None:
    for row in rows(None):
        assert row.passed, explanation(row)
        assert (row.step, row.parameter, row.reason) == (None, None, None)


@pytest.mark.parametrize("fault", FOUND)
def test_an_injected_fault_is_found(fault: str) -> None:
    """Under each optimizer and accumulation."""
    found = rows(fault)
    assert [row.passed for row in found] == [False] * len(found), [explanation(row) for row in found]
    _, accumulated, _ = found
    step, parameter = FOUND[fault]
    assert accumulated.status == "failed"
    assert (accumulated.step, accumulated.parameter) == (step, parameter), explanation(accumulated)
    assert accumulated.reason
    assert f"step {step}" in explanation(accumulated)


def test_under_a_normalizing_optimizer_only_gradients_show_a_factor() -> None:
    """Adam cancels a factor: gradients twice too large leave its weights as they were."""
    as_configured, _, _ = rows("a missing division by ranks")
    assert as_configured.max_weight_difference is not None
    assert as_configured.max_weight_difference < 1e-4
    assert as_configured.max_gradient_difference == pytest.approx(1, rel=1e-3)


# --- models and objectives whose runs depend on the number of ranks by design ---------------------------------------

MEASURED = {
    "OwnMean": "a forward depends on earlier ones: the loss of 8 samples is ",
    "WarmsUp": "a forward depends on earlier ones: the loss of 8 samples is ",
    "Draws": "a forward draws random numbers that verify can't turn off",
    "Centered": "couples the samples of a micro-batch: the summed loss of 8 samples is ",
    "InBatch": "couples the samples of a micro-batch: the summed loss of 8 samples is ",
}


@pytest.mark.parametrize("name", MEASURED)
def test_the_measured_cause_explains_a_run_that_depends_on_its_micro_batches(name: str) -> None:
    objects = UserObjects(objective=small.InBatch()) if name == "InBatch" else UserObjects()
    config = small.config("Net" if name == "InBatch" else name, batch={"global_size": 12})
    failed = [row for row in with_faults(config, [None], given=objects)[0] if row.status == "failed"]
    assert failed
    for row in failed:
        assert MEASURED[name] in (row.reason or ""), explanation(row)
