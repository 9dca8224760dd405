"""How much a run may differ from the single process, and why so much: see docs/verify.md.

A sum of floating-point numbers depends on the order of its terms. Ranks and micro-batches change that order, so equal
runs differ in the last bits; a fault differs by more than any order of the same terms could.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

EPS = 2.0**-24
"""Of a rounding to fp32, in which parameters and optimizer state are kept under each precision."""
INDIFFERENT = 1e-6
"""A gradient below this share of the whole one's is rounding alone. Rules that normalise make whole steps of it, in
directions that mean nothing: such a parameter's weights are judged under SGD only."""
NORMALISING = ("adamw", "adam", "adafactor", "lion", "muon", "custom", "given")
"""Rules whose step depends on a gradient's sign or on its ratio to its past, not on its size; of one that was handed
over (`given`) it isn't known."""


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Attributes:
    loss, norm: relative.
    gradient: of each parameter, in units of its gradient's norm.
    weights: in units of the summed learning rate, root mean square over a parameter, under SGD.
    normalised: the same under an optimizer that normalises.
    noise: a gradient whose norm is below this share of the whole one's is held against that share: to some parameters
        (the bias of an attention's keys) the loss is indifferent, and their gradient is the rounding of the others'.
    """

    loss: float
    norm: float
    gradient: float
    weights: float
    normalised: float
    noise: float

    def of_weights(self, optimizer: str) -> float:
        return self.normalised if optimizer in NORMALISING else self.weights


TOLERANCES: Mapping[str, Tolerance] = {
    "fp32": Tolerance(loss=1e-6, norm=1e-5, gradient=1e-5, weights=1e-6, normalised=1e-2, noise=1e-4),
    "bf16": Tolerance(loss=1e-3, norm=1e-2, gradient=5e-2, weights=5e-3, normalised=5e-1, noise=1e-3),
    "fp16": Tolerance(loss=2e-4, norm=2e-3, gradient=1e-2, weights=1e-3, normalised=5e-1, noise=1e-3),
}
