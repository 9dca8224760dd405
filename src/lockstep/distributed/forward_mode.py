"""How the forwards of one model run: sequences sharded over ranks or not, whole or sharded weights, refused weights.

the engine sets       sequences              attention is ring attention, positions are this rank's
a check sets          whole_weights          tensor-parallel modules compute with gathered weights
a stage sets          refused_sides          weights that other stages hold may not be used

2 ranks, 8 positions     0 1 | 2 3 | 4 5 | 6 7     each rank has a chunk from the front and one from the back:
belong to rank            0     1     1     0      under causal attention all ranks then compute as much
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lockstep.core.errors import RunFailed
from lockstep.distributed.collectives import Ring

Side = Literal["before", "after"]
"""A side of the blocks."""
ALL_SIDES: frozenset[Side | None] = frozenset(("before", "after", None))


@dataclass(frozen=True, slots=True, eq=False)
class SequencePartition:
    """The partition of the sequences of one micro-batch, which all have the same length.

    Attributes:
        length: The length of each sequence, without padding to a multiple of twice the ranks.
        positions: [own] int64, of this rank's tokens, in order; padding has the last token's.
        real: [B, padded] bool: positions that others may attend to; None: all.
        unreal_last: True if padding is on the right, where causal attention never looks.
    """

    ring: Ring
    length: int
    positions: Tensor
    real: Tensor | None = None
    unreal_last: bool = False

    @property
    def own(self) -> int:
        """Number of positions that this rank has: two chunks."""
        return len(self.positions)


def padded_length(length: int, ranks: int) -> int:
    """Return the next length that divides into equal chunks."""
    return -(-length // (2 * ranks)) * 2 * ranks


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """Return a rank's chunks: one from the front, one from the back."""
    return rank, 2 * ranks - 1 - rank


def positions_of(rank: int, ranks: int, length: int) -> Tensor:
    """Return [own] int64: a rank's positions in a sequence of `length`, which is padded."""
    chunk = padded_length(length, ranks) // (2 * ranks)
    return torch.cat([torch.arange(index * chunk, (index + 1) * chunk) for index in chunks_of(rank, ranks)])


class ForwardMode:
    """The mode of one model's forwards. A backward may read it in another thread.

    Attributes:
        sequences: How sequences are sharded over ranks; None: they are whole.
        whole_weights: Whether modules with sharded weights compute with all of them.
        refused_sides: Sides of the blocks with weights that this rank may not use; None: used by both sides.
    """

    def __init__(self) -> None:
        self.sequences: SequencePartition | None = None
        self.whole_weights = False
        self.refused_sides: frozenset[Side | None] = frozenset()

    def divide_sequences(self, sequences: SequencePartition | None) -> None:
        """Set how the forwards and backwards that follow divide sequences; None: they are whole."""
        global _dividing
        self.sequences = sequences
        _dividing = self if sequences is not None else None


_dividing: ForwardMode | None = None
"""The mode while a forward or backward divides sequences. Process-wide, since user code calls `positions`
without its model, and autograd's threads, which recompute blocks, see no context variable."""


def current_sequences() -> SequencePartition | None:
    """Return how sequences are divided in the forward or backward that runs; None: they are whole."""
    return None if _dividing is None else _dividing.sequences


def positions(length: int, device: torch.device | str | None = None) -> Tensor:
    """Return the positions of a model's `length` tokens in their sequences: [length] int64.

    They are 0, 1, 2, ..., unless `parallel.context` shards sequences. A model that calls this instead of
    `torch.arange(length)` can be trained under context parallelism.
    """
    division = current_sequences()
    if division is None:
        return torch.arange(length, device=device)
    if length != division.own:
        raise RunFailed(
            f"the model asks for the positions of {length} tokens, and this rank has {division.own} of each sequence; "
            "parallel.context needs all layers of the model to see the same tokens"
        )
    return division.positions
