"""How much a run may differ from the single process: see docs/verify.md.

The order of a floating-point sum depends on ranks and micro-batches, so correct runs differ in the last bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lockstep.plan.optimizers import OPTIMIZERS

EPS = 2.0**-24
"""Relative error of a rounding to fp32, the dtype of parameters and optimizer state under each precision."""
NEGLIGIBLE_GRADIENT = 1e-6
"""A gradient below this share of the global one is only rounding. A normalizing optimizer makes whole steps of it, in
directions without meaning: the weights of such a parameter are compared under SGD only."""
NORMALIZING_OPTIMIZERS = frozenset(name for name, facts in OPTIMIZERS.items() if facts.normalizes)
"""Optimizers that use a gradient's sign or its ratio to its past, not its size. An optimizer object
of the user (`given`) may be one."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """The largest differences that rounding explains, in one precision.

    Attributes:
        loss, norm: Relative.
        gradient: Of each parameter, relative to its gradient's norm.
        weights: Root mean square over a parameter, relative to the summed learning rate, under SGD.
        normalized_weights: The same under a normalizing optimizer.
        noise: Share of the global norm below which a gradient is rounding, and compared relative to that share.
    """

    loss: float
    norm: float
    gradient: float
    weights: float
    normalized_weights: float
    noise: float


TOLERANCES: Mapping[str, Tolerance] = {
    "fp32": Tolerance(loss=1e-6, norm=1e-5, gradient=1e-5, weights=1e-6, normalized_weights=1e-2, noise=1e-4),
    "bf16": Tolerance(loss=1e-3, norm=1e-2, gradient=5e-2, weights=5e-3, normalized_weights=5e-1, noise=1e-3),
    "fp16": Tolerance(loss=2e-4, norm=2e-3, gradient=1e-2, weights=1e-3, normalized_weights=5e-1, noise=1e-3),
}
