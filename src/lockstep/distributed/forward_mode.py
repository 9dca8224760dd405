"""How the forwards of one model run at the moment: what its transforms and its engine agree on.

    the engine sets       sequences              attention is ring attention, positions are those of this rank
    a check sets          whole_weights          tensor-parallel modules compute with gathered weights
    a stage sets          refused_sides          weights that other stages hold may not be used

Each parallelized model has one, which its transforms keep and its engine changes; there is no other switch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from lockstep.distributed.sequences import SequencePartition

Side = Literal["before", "after"]
"""A side of the blocks."""
ALL_SIDES: frozenset[Side | None] = frozenset(("before", "after", None))


class ForwardMode:
    """The mode of one model's forwards. A backward may ask in another thread.

    Attributes:
        sequences: How sequences are divided over ranks; None: they are whole.
        whole_weights: Whether modules whose weights are divided compute with all of them.
        refused_sides: Sides of the blocks whose weights may not be used on this rank; None is what both sides use.
    """

    def __init__(self) -> None:
        self.sequences: SequencePartition | None = None
        self.whole_weights = False
        self.refused_sides: frozenset[Side | None] = frozenset()

    @contextmanager
    def with_whole_weights(self) -> Iterator[None]:
        """Compute with whole weights while the block runs."""
        self.whole_weights = True
        try:
            yield
        finally:
            self.whole_weights = False
