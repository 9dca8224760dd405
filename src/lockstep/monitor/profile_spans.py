"""The updates that are traced, and how: from a config, or from a request while the run trains.

steps: 10..21, active: 3, wait: 2, warmup: 1

update   9         10 11 12   13 14   15        16 17 18   19 20   21
         warmup    trace      wait    warmup    trace      wait    (too few for a third)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lockstep.config.training_sections import step_range

if TYPE_CHECKING:
    from lockstep.config.training_sections import ProfileConfig

PROFILE = "profile"
"""The folder of a run's traces."""
TRACE_SUFFIX = ".pt.trace.json.gz"
REQUEST_LEAD = 3
"""Updates between the vote that carries a request and its warmup: on a GPU, a vote is read one late."""


@dataclass(frozen=True, slots=True)
class Span:
    """The updates of one trace.

    Attributes:
        first, last: Numbers of the updates that are recorded, from 1.
        warmup: Updates before, in which the profiler runs already.
    """

    first: int
    last: int
    warmup: int

    @property
    def begin(self) -> int:
        """The first update in which the profiler runs."""
        return max(1, self.first - self.warmup)

    @property
    def count(self) -> int:
        return self.last - self.first + 1

    def resumed(self, next_update: int) -> Span | None:
        """Return what is left of the span before `next_update`; None if it is over."""
        if next_update > self.last:
            return None
        first = max(self.first, next_update)
        return Span(first, self.last, first - max(self.begin, next_update))


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """The content of a trace; see `ProfileConfig`.

    Attributes:
        ranks: Ranks that record; None: all.
    """

    ranks: tuple[int, ...] | None = (0,)
    shapes: bool = True
    memory: bool = True
    stacks: bool = False
    flops: bool = False

    def includes(self, rank: int) -> bool:
        return self.ranks is None or rank in self.ranks


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A request for a trace of the next updates of a run that trains.

    Attributes:
        name: Identifies the request and its answer.
        count: Number of updates to record.
    """

    name: str
    count: int
    warmup: int
    options: TraceOptions

    def record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of_record(cls, record: dict[str, Any]) -> TraceRequest:
        options = dict(record["options"])
        ranks = options.pop("ranks")
        return cls(
            str(record["name"]),
            int(record["count"]),
            int(record["warmup"]),
            TraceOptions(None if ranks is None else tuple(map(int, ranks)), **options),
        )


def spans_of(config: ProfileConfig) -> list[Span]:
    """Return the traces that a config asks for."""
    if config.steps is None:
        return []
    first, last = step_range(config.steps)
    active = config.active or last - first + 1
    period = active + config.wait + config.warmup
    starts = list(range(first, last - active + 2, period))[: config.repeat]
    return [Span(start, start + active - 1, min(config.warmup, start - 1)) for start in starts]


def options_of(config: ProfileConfig) -> TraceOptions:
    """Return what a config's traces have."""
    ranks = None if config.ranks == "all" else tuple(config.ranks)
    return TraceOptions(ranks, config.shapes, config.memory, config.stacks, config.flops)


def next_free(step: int, request: TraceRequest, planned: Sequence[Span]) -> Span:
    """Return the updates of a request from the vote of update `step`, after those that are planned."""
    span = Span(
        step + REQUEST_LEAD + request.warmup, step + REQUEST_LEAD + request.warmup + request.count - 1, request.warmup
    )
    for other in sorted(planned, key=lambda other: other.first):
        if span.begin <= other.last and other.begin <= span.last:
            first = other.last + 1 + request.warmup
            span = Span(first, first + request.count - 1, request.warmup)
    return span
