"""A source whose batches are completed: what a model's forward wants beside what the data has."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.core.protocols import Source
from lockstep.core.records import Batch
from lockstep.data.order import Indices


class PreparedSource:
    """Args:
    prepare: batch -> batch, on the CPU; it changes no samples, so that the fingerprint stays.
    """

    def __init__(self, source: Source, prepare: Callable[[Batch], Batch]) -> None:
        self._source = source
        self._prepare = prepare
        self.facts = source.facts
        self.fingerprint = source.fingerprint
        self.draws = source.draws

    def fetch(self, indices: Indices) -> Batch:
        return self._prepare(self._source.fetch(indices))
