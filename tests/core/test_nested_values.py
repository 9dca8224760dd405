"""Nested values are compared by their dotted keys."""

from __future__ import annotations

from lockstep.core.formatting import differing, flat


def test_values_have_dotted_keys_and_lists_stay_whole() -> None:
    nested = {"run": {"seed": 1, "steps": None}, "transforms": [{"target": "a:B"}], "model": {}}
    assert dict(flat(nested)) == {"run.seed": 1, "run.steps": None, "transforms": [{"target": "a:B"}], "model": {}}


def test_what_only_one_has_differs_unless_it_is_empty() -> None:
    then = {"optim": {"lr": 0.1, "betas": [0.9, 0.99]}, "model": {"width": 8}, "own": {}}
    now = {"optim": {"lr": 0.2, "betas": [0.9, 0.99]}, "model": None}
    assert differing(then, now) == {"optim.lr": (0.1, 0.2), "model.width": (8, None)}
    assert differing(then, then) == {}
