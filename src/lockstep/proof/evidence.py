"""Records of a run and of its comparison with the reference, update by update: plain values, on the first rank."""

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
        content: Digest and sum of the samples' targets and inputs, independent of their order.
        counts: Valid targets of each micro-batch, rank by rank.
        reported: Whether the update completed; the fields below are those of its report.
    """

    step: int
    count: float
    samples: int
    digest: int
    content: list[float]
    counts: list[list[float]]
    reported: bool = False
    loss: float = float("nan")
    norm: float = float("nan")
    rate: float = 0.0
    kept: bool = True


@dataclass(slots=True)
class ParameterDeviation:
    """A parameter whose gradient or weights exceed the tolerance.

    Attributes:
        difference: In the unit of the tolerance.
        factor: The multiple of the reference that is nearest to the run.
        residual: What then remains, relative to the reference's norm.
    """

    name: str
    difference: float
    factor: float
    residual: float


@dataclass(slots=True)
class TensorComparison:
    """Gradients or weights of all parameters at one step, compared with the reference's.

    Attributes:
        worst: The largest difference of a parameter.
        largest: The largest difference of a single element.
        first: The first parameter out of tolerance, in the model's order.
        deviating: Number of parameters out of tolerance, among `total`.
        factor, residual: As in `ParameterDeviation`, for all parameters together.
        missing, extra: Names that only the reference, or only the run, has.
    """

    worst: float = 0.0
    largest: float = 0.0
    first: ParameterDeviation | None = None
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
        return self.first.name if self.first else next(iter([*self.missing, *self.extra]), None)


@dataclass(slots=True)
class StepComparison:
    """An update of a run, compared with the same update of the reference.

    Attributes:
        gradient: Before clipping.
        slack: Additional tolerance of the gradient, for weights that differ within their own.
        weights: After the update.
        unequal: The first parameter of which ranks that hold all of it hold different values.
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
class PublishedComparison:
    """The weight files that a run publishes, compared with the reference's.

    Attributes:
        failure: Why the run could not publish any.
        missing, extra: Names that only the reference, or only the run, has.
        reshaped: Names whose shape differs.
        deviating: Names whose values are out of tolerance.
    """

    failure: str | None = None
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    reshaped: list[str] = field(default_factory=list)
    deviating: list[str] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        return not (self.failure or self.missing or self.extra or self.reshaped or self.deviating)


@dataclass(slots=True)
class Evidence:
    """All that is known of a run and its reference.

    Attributes:
        initial: The weights before the first update.
        summed_rate: Sum of the learning rates of the updates that were kept.
        tied: Groups of names that share one parameter.
        shift: How many samples the run is ahead of the reference (behind, if negative), where that explains its digest.
        failure: Why the run ended early, if it did.
        notes: What of the model makes a run depend on the number of ranks by design.
        measured: The same as shown by forwards of the reference.
        published: None: the run ended early, or this isn't the first rank.
    """

    initial: TensorComparison
    steps: list[StepComparison]
    summed_rate: float
    tied: list[list[str]]
    shift: int | None = None
    failure: str | None = None
    notes: list[str] = field(default_factory=list)
    measured: list[str] = field(default_factory=list)
    published: PublishedComparison | None = None


def _relative(value: float, expected: float) -> float:
    """Return the relative difference; 0 for NaN beside NaN, and for infinity beside itself."""
    if value == expected or (math.isnan(value) and math.isnan(expected)):
        return 0.0
    return abs(value - expected) / abs(expected) if expected else math.inf
