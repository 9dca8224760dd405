"""A proof is worth what it would find: each of these bugs is planted in a run, and must be found and named."""

from __future__ import annotations

from functools import cache

import pytest
from kit import small
from kit.faults import FAULTS, PUBLISHING, STOPPING
from kit.proofs import text, with_faults

from lockstep.proof.rows import Row, story
from lockstep.training.user_objects import UserObjects

PLANTED = {**FAULTS, **STOPPING, **PUBLISHING}

FOUND = {
    "a mean of means": (1, "embedding.weight", "a mean of means"),
    "a missing division by ranks": (1, "embedding.weight", "a missing division by the data ranks"),
    "a double reduction": (1, "embedding.weight", "a second all-reduce"),
    "one swapped sample": (1, "embedding.weight", "a sample was swapped"),
    "a cursor off by one": (1, "embedding.weight", "the cursor is off by 1"),
    "a clip norm of one rank": (1, None, "its square is 1/2 of the whole gradient's"),
    "a stale moment": (3, "embedding.weight", "a stale moment"),
    "an unsynchronised tied weight": (1, "embedding.weight", "embedding.weight = head.weight"),
    "a tensor lost when published": (4, None, "lack 5 of the model's"),
    "a tensor published stale": (4, "blocks.0.attention_norm.weight", "gathered or written"),
}
"""Step, first parameter, and words of the likely reason, of the run in two micro-batches."""


@cache
def rows() -> dict[str | None, list[Row]]:
    """With each fault, and with none: as asked, accumulated, under SGD."""
    found = with_faults(text(), [None, *PLANTED.values()])
    return dict(zip([None, *PLANTED], found, strict=True))


def test_there_is_a_fault_of_each_kind() -> None:
    assert set(FOUND) == set(PLANTED)


def test_without_a_fault_nothing_is_found() -> None:
    for row in rows()[None]:
        assert row.passed, story(row)
        assert (row.step, row.parameter, row.reason) == (None, None, None)


@pytest.mark.parametrize("fault", FOUND)
def test_a_planted_fault_is_found_and_named(fault: str) -> None:
    _, accumulated, _ = rows()[fault]
    step, parameter, words = FOUND[fault]
    assert accumulated.status == "failed"
    assert accumulated.passed is False
    assert (accumulated.step, accumulated.parameter) == (step, parameter), story(accumulated)
    assert accumulated.reason is not None
    assert words in accumulated.reason
    assert f"step {step}" in story(accumulated)


@pytest.mark.parametrize("fault", FOUND)
def test_a_planted_fault_is_found_under_each_optimizer_and_cut(fault: str) -> None:
    for row in rows()[fault]:
        assert row.passed is False, story(row)


def test_under_a_rule_that_normalises_weights_hide_what_gradients_show() -> None:
    """Adam divides a factor away: gradients twice too large leave its weights where they were."""
    as_asked, _, _ = rows()["a missing division by ranks"]
    assert as_asked.max_weight_difference is not None
    assert as_asked.max_weight_difference < 1e-4
    assert as_asked.max_gradient_difference == pytest.approx(1, rel=1e-3)


# --- what a model or an objective does by itself --------------------------------------------------------------------

OWN = {
    "OwnMean": "a forward depends on those before it: 8 samples have a loss of ",
    "WarmsUp": "it changes forwards, of which each rank has its own",
    "Draws": "a forward draws numbers that the proof could not turn off",
    "Centered": "samples of a micro-batch are tied to one another: 8 of them have a summed loss of ",
    "InBatch": "samples of a micro-batch are tied to one another: 8 of them have a summed loss of ",
}


@pytest.mark.parametrize("name", OWN)
def test_a_run_that_depends_on_its_cut_is_given_the_measured_reason(name: str) -> None:
    given = UserObjects(objective=small.InBatch()) if name == "InBatch" else UserObjects()
    asked = small.config("Net" if name == "InBatch" else name, batch={"global_size": 12})
    failed = [row for row in with_faults(asked, [None], given=given)[0] if row.status == "failed"]
    assert failed
    for row in failed:
        assert OWN[name] in (row.reason or ""), story(row)
        assert "Else" not in (row.reason or "")
