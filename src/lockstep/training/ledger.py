"""The record of which samples the updates of a run have consumed, over all its attempts.

attempt 1, 2 ranks    [0 ............ 4,096)    digest     a checkpoint's ledger covers the updates that led to its
attempt 2, 4 ranks    [4,096 ........ 9,216)    digest     weights; updates that were lost are not in it

Positions and digests are recorded as updates are made; the ranks add up the digests in their votes. `training.audit`
recomputes the digests from the recorded order, without the data, to prove that no sample is missing or repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from lockstep.core.records import LeftOutSample
from lockstep.data.order import MODULUS

if TYPE_CHECKING:
    from lockstep.training.components import Components


@dataclass(frozen=True, slots=True)
class OrderFacts:
    """The mapping of positions in a run to samples.

    Attributes:
        samples: size of the dataset.
        epoch_samples: samples that an epoch uses.
        fingerprint: of the dataset.
    """

    seed: int
    shuffle: bool
    samples: int
    epoch_samples: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive updates of one attempt.

    Attributes:
        attempt: from 1; 0: another program used them (`imported_ledger`).
        first, last: positions; `last` is exclusive.
        digest: of these samples (`data.order`), summed over the ranks.
    """

    attempt: int
    ranks: int
    first: int
    last: int
    digest: int
    order: OrderFacts


class Ledger:
    """The segments of a run; updates are added as the current attempt makes them."""

    def __init__(self, ranks: int, order: OrderFacts) -> None:
        self._ranks = ranks
        self._order = order
        self.attempt = 1
        self._closed: list[Segment] = []
        self._first = self._last = 0
        self._digest = 0

    def add(self, first: int, last: int, digest: float) -> None:
        """Add an update. Every step calls it, so it only adds (0.2 us)."""
        if first != self._last:
            self._closed = self.segments
            self._first, self._digest = first, 0
        self._last = last
        self._digest += int(digest)

    @property
    def segments(self) -> list[Segment]:
        """Segments in the order in which they were made."""
        if self._first == self._last:
            return list(self._closed)
        digest = self._digest % MODULUS
        return [*self._closed, Segment(self.attempt, self._ranks, self._first, self._last, digest, self._order)]

    def state(self) -> list[dict[str, Any]]:
        """Return the segments as plain JSON."""
        return [asdict(segment) for segment in self.segments]

    def restore(self, state: Iterable[Mapping[str, Any]]) -> None:
        """Continue the ledger of a checkpoint, with a new attempt."""
        self._closed = segments_in(state)
        self.attempt = 1 + max((segment.attempt for segment in self._closed), default=0)
        self._first = self._last = self._closed[-1].last if self._closed else 0
        self._digest = 0

    def continue_with(self, fingerprint: str) -> None:
        """Record the fingerprint of the run's data so, whichever samples this attempt leaves out."""
        self._order = replace(self._order, fingerprint=fingerprint)


def imported_ledger(order: OrderFacts, samples: int) -> list[dict[str, Any]]:
    """Return the ledger of a run that another program began: it used as many samples, in an order of its own."""
    return [asdict(Segment(0, 0, 0, samples, 0, order))] if samples else []


def left_out_in(state: Iterable[Mapping[str, Any]]) -> list[LeftOutSample]:
    """Return the samples that a checkpoint lists as left out. Raises TypeError if the list isn't of that form."""
    return [LeftOutSample(**fields) for fields in state]


def order_of(components: Components) -> OrderFacts:
    """Return the mapping of positions to samples of a session."""
    config, source = components.config, components.source
    return OrderFacts(
        seed=config.run.seed,
        shuffle=config.data.shuffle,
        samples=source.facts.samples,
        epoch_samples=components.plan.epoch_samples,
        fingerprint=source.fingerprint,
    )


def segments_in(state: Iterable[Mapping[str, Any]]) -> list[Segment]:
    """Return the segments that `Ledger.state` wrote. Raises TypeError or KeyError if the state isn't a ledger's."""
    return [Segment(**{**segment, "order": OrderFacts(**segment["order"])}) for segment in state]
