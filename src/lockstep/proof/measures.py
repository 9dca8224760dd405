"""Relative differences of numbers."""

from __future__ import annotations

import math

from lockstep.proof.evidence import Step


def loss_difference(step: Step) -> float:
    return relative(step.run.loss, step.reference.loss)


def norm_difference(step: Step) -> float:
    return relative(step.run.norm, step.reference.norm)


def relative(value: float, expected: float) -> float:
    """NaN beside NaN, and infinity beside itself, are no difference."""
    if value == expected or (math.isnan(value) and math.isnan(expected)):
        return 0.0
    return abs(value - expected) / abs(expected) if expected else math.inf
