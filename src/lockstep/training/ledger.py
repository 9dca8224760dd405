"""Which samples the updates of a run have had, through all its attempts: proof that none is missing and none is double.

attempt 1, 2 ranks    [0 ............ 4,096)    digest     what a checkpoint holds is what led to its weights:
attempt 2, 4 ranks    [4,096 ........ 9,216)    digest     updates that were lost are not in it

What is written down is what happened: positions, and the digest that the ranks have added up in their votes. Beside it
stands by what positions become samples: so `training.audit` can say what the digest must be, without the data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lockstep.data.order import MODULUS


@dataclass(frozen=True, slots=True)
class OrderFacts:
    """By what the positions of a run become samples.

    Attributes:
        seed: of the run.
        shuffle: false: the samples in their own order.
        samples: that the data set has.
        epoch_samples: that an epoch uses.
        fingerprint: of the data set.
    """

    seed: int
    shuffle: bool
    samples: int
    epoch_samples: int
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Segment:
    """What one attempt did without a break.

    Attributes:
        attempt: from 1.
        ranks: that it ran on.
        first, last: cursors: samples `first` up to `last` of the run, `last` not among them.
        digest: of these samples (`data.order`), as the ranks have added it up.
        order: that they came in.
    """

    attempt: int
    ranks: int
    first: int
    last: int
    digest: int
    order: OrderFacts


class Ledger:
    """Of one run, on this attempt's ranks."""

    def __init__(self, ranks: int, order: OrderFacts) -> None:
        self._ranks = ranks
        self._order = order
        self.attempt = 1
        self._ended: list[Segment] = []
        self._first = self._last = 0
        self._digest = 0

    def add(self, first: int, last: int, digest: float) -> None:
        """One update. On every step's way, so it only adds (0.2 us)."""
        if first != self._last:
            self._ended = self.segments
            self._first, self._digest = first, 0
        self._last = last
        self._digest += int(digest)

    @property
    def segments(self) -> list[Segment]:
        """In the order in which they were made."""
        if self._first == self._last:
            return list(self._ended)
        digest = self._digest % MODULUS
        open_one = Segment(self.attempt, self._ranks, self._first, self._last, digest, self._order)
        return [*self._ended, open_one]

    def state(self) -> list[dict[str, Any]]:
        """Plain JSON."""
        return [asdict(segment) for segment in self.segments]

    def restore(self, state: Iterable[Mapping[str, Any]]) -> None:
        """Goes on with a new attempt."""
        self._ended = segments_in(state)
        self.attempt = 1 + max((segment.attempt for segment in self._ended), default=0)
        self._first = self._last = self._ended[-1].last if self._ended else 0
        self._digest = 0


def segments_in(state: Iterable[Mapping[str, Any]]) -> list[Segment]:
    """What `Ledger.state` told. Raises TypeError, KeyError: it is no ledger's."""
    return [Segment(**{**segment, "order": OrderFacts(**segment["order"])}) for segment in state]
