"""What was seen at each step of a run and of its reference: plain values, on the first rank."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class UpdateRecord:
    """One update of one run, the same on all ranks.

    Attributes:
        count: valid targets.
        samples: consumed so far.
        digest: of which samples they were (`data.order`).
        content: of the samples' targets and inputs, in whatever order.
        counts: valid targets of each micro-batch, rank by rank.
        reported: the update came to its end, and what follows is of its report.
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
class Off:
    """A parameter that is off.

    Attributes:
        difference: as the tolerance counts.
        factor: by which the reference must be multiplied to come nearest.
        rest: what is then left, in units of the reference's norm.
    """

    name: str
    difference: float
    factor: float
    rest: float


@dataclass(slots=True)
class Compared:
    """All parameters' gradients or weights of one step, against the reference's.

    Attributes:
        worst: the largest difference.
        largest: of weights, the largest of a single element.
        first: parameter out of tolerance, in the model's order.
        off: how many are out of tolerance; of `number`.
        factor, rest: as of `Off`, of all together.
        missing, extra: names that only the reference, or only the run, has.
    """

    worst: float = 0.0
    largest: float = 0.0
    first: Off | None = None
    off: int = 0
    number: int = 0
    factor: float = 1.0
    rest: float = 0.0
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        return not (self.off or self.missing or self.extra)

    @property
    def named(self) -> str | None:
        """The first parameter that is wrong in any way."""
        names = [*self.missing, *self.extra]
        return self.first.name if self.first else (names[0] if names else None)


@dataclass(slots=True)
class Step:
    """An update of a run beside that of its reference.

    Attributes:
        gradient: before clipping.
        drift: how much its tolerance is wider, for weights that are off within theirs.
        weights: after the update.
        apart: the first parameter of which ranks that hold it whole hold different values.
    """

    run: UpdateRecord
    reference: UpdateRecord
    gradient: Compared
    drift: float = 0.0
    weights: Compared | None = None
    apart: str | None = None


@dataclass(slots=True)
class Published:
    """The weights that a run leaves, against those that the reference has left, file beside file.

    Attributes:
        said: why there are none.
        missing, extra, reshaped: names that the reference's file has and the run's hasn't, or the other way round, or
            that have another shape.
        off: names whose values are out of tolerance.
    """

    said: str | None = None
    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    reshaped: list[str] = field(default_factory=list)
    off: list[str] = field(default_factory=list)

    @property
    def agrees(self) -> bool:
        return not (self.said or self.missing or self.extra or self.reshaped or self.off)


@dataclass(slots=True)
class Evidence:
    """Attributes:
    begins: the weights before the first update.
    summed_rate: of the updates that were kept.
    tied: names of one parameter, several in a row.
    shift: by how many samples the run's are behind (or, negative, ahead), where that explains its digest.
    said: why the run ended early, if it did.
    notes: what of the model makes a run depend on ranks by design.
    measured: why it does, as forwards of the reference have shown.
    published: None: the run ended early, or this isn't the first rank.
    """

    begins: Compared
    steps: list[Step]
    summed_rate: float
    tied: list[list[str]]
    shift: int | None = None
    said: str | None = None
    notes: list[str] = field(default_factory=list)
    measured: list[str] = field(default_factory=list)
    published: Published | None = None
