"""An engine whose micro-batches are numbered through all ranks, so that what they draw doesn't know of ranks.

update of 5 micro-batches    0 1 2 | 3 4
rank 1                               0 1      the engine's own count, + 3
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from lockstep.engine.eager import Eager

if TYPE_CHECKING:
    from torch import Tensor

    from lockstep.core.records import Batch, GlobalBatch, Inputs
    from lockstep.plan.batch import Share


class Numbered:
    """Args:
    make: the engine that does the work, from what it is to call with (step, micro-batch) before each forward.
    key_draws: called with (step, micro-batch of the update).
    share: this rank's, of an update of so many samples.
    begin: told the share before an update's first forward.
    """

    def __init__(
        self,
        make: Callable[[Callable[[int, int], None]], Eager],
        key_draws: Callable[[int, int], None],
        share: Callable[[int], Share],
        begin: Callable[[Share], None],
    ) -> None:
        self._engine = make(self._key)
        self._key_draws = key_draws
        self._share = share
        self._begin = begin
        self._first = 0
        self.evaluate: Callable[[Iterable[Batch]], Mapping[str, Tensor]] = self._engine.evaluate
        self.outputs: Callable[[Inputs], object] = self._engine.outputs

    def accumulate(self, batch: GlobalBatch, seed_scale: float | Tensor, announce: Callable[[Tensor], None]) -> None:
        share = self._share(batch.samples)
        self._first = share.first
        self._begin(share)
        self._engine.accumulate(batch, seed_scale, announce)

    def _key(self, step: int, micro_batch: int) -> None:
        self._key_draws(step, self._first + micro_batch)
