"""Distinguishes the discarded updates that a run has passed from those at its end that keep it from learning."""

from __future__ import annotations

from collections.abc import Collection

_MANY = 20  # in a row: more than a new loss scale of fp16 needs


def passed(discarded: Collection[int], last: int) -> set[int]:
    """Return the discarded updates that a run has passed: all but many in a row up to the last one.

    Args:
        discarded: Their steps.
        last: The step of the last update.
    """
    steps, kept = {*discarded}, last
    while kept in steps:
        kept -= 1
    return {step for step in steps if step <= kept} if last - kept >= _MANY else steps
