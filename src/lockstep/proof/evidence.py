"""The evidence of a run beside its reference, step by step: plain values, on rank 0."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(slots=True)
class UpdateRecord:
    """One update of one run, equal on all ranks.

    Attributes:
        count: Valid targets.
        samples: Samples consumed so far.
        digest: Digest of the samples' indices (`data.order`).
        reported: True once the update is complete and the fields below are set.
    """

    step: int
    count: float
    samples: int
    digest: int
    reported: bool = False
    loss: float = float("nan")
    norm: float = float("nan")
    rate: float = 0.0
    kept: bool = True


@dataclass(slots=True)
class TensorComparison:
    """Gradients or weights of all parameters at one step, compared with the reference's.

    Attributes:
        worst: The largest difference of a parameter, in the unit of the tolerance.
        largest: The largest difference of a single element.
        first, first_difference: The first parameter out of tolerance, in the model's order.
        deviating: Number of parameters out of tolerance, among `total`.
        factor: The multiple of the reference that is nearest to the run.
        residual: What then remains, relative to the reference's norm.
        missing, extra: Names that only the reference, or only the run, has.
    """

    worst: float = 0.0
    largest: float = 0.0
    first: str | None = None
    first_difference: float = 0.0
    deviating: int = 0
    total: int = 0
    factor: float = 1.0
    residual: float = 0.0
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        return not (self.deviating or self.missing or self.extra)

    @property
    def first_name(self) -> str | None:
        """The first parameter that deviates, is missing or is extra."""
        return self.first or next(iter([*self.missing, *self.extra]), None)


@dataclass(slots=True)
class StepComparison:
    """An update of a run, compared with the same update of the reference.

    Attributes:
        gradient: Before clipping.
        slack: Additional tolerance of the gradient, for weights that differ within their own.
        weights: After the update.
        unequal: The first replicated parameter with different values on different ranks.
    """

    run: UpdateRecord
    reference: UpdateRecord
    gradient: TensorComparison
    slack: float = 0.0
    weights: TensorComparison | None = None
    unequal: str | None = None

    @property
    def loss_difference(self) -> float:
        return _relative(self.run.loss, self.reference.loss)

    @property
    def norm_difference(self) -> float:
        return _relative(self.run.norm, self.reference.norm)

    @property
    def same_samples(self) -> bool:
        return (self.run.samples, self.run.digest) == (self.reference.samples, self.reference.digest)


@dataclass(slots=True)
class Evidence:
    """All that is known of a run and its reference.

    Attributes:
        initial: The weights before the first update.
        summed_rate: Sum of the learning rates of the updates that were kept.
        failure: Why the run ended early, or could not publish its weights.
        notes: Why the model's result depends on the number of ranks by design.
        measured: The same as shown by forwards of the reference.
        published: Parameters with different published weights, and how they differ.
    """

    initial: TensorComparison = field(default_factory=TensorComparison)
    steps: list[StepComparison] = field(default_factory=list)
    summed_rate: float = 0.0
    failure: str | None = None
    notes: list[str] = field(default_factory=list)
    measured: list[str] = field(default_factory=list)
    published: dict[str, str] = field(default_factory=dict)


def _relative(value: float, expected: float) -> float:
    """Return the relative difference; 0 for NaN beside NaN, and for infinity beside itself."""
    if value == expected or (math.isnan(value) and math.isnan(expected)):
        return 0.0
    return abs(value - expected) / abs(expected) if expected else math.inf
