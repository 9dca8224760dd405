"""A sequence that is divided over ranks: which of its positions belong to which rank.

2 ranks, 8 positions     0 1 | 2 3 | 4 5 | 6 7        twice as many chunks as ranks, each rank has two: one from the
belong to rank            0     1     1     0         front, one from the back; under causal attention, where later
                                                      positions see more, all ranks have as much to compute
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lockstep.core.errors import RunFailed
from lockstep.distributed.ring import Ring

if TYPE_CHECKING:
    from lockstep.distributed.forward_mode import ForwardMode


@dataclass(frozen=True, slots=True, eq=False)
class SequencePartition:
    """The division of the sequences of one micro-batch, which all have the same length.

    Attributes:
        ring: The ranks that have the same samples.
        length: The length of each sequence; padded to a multiple of twice the ranks.
        positions: [own] int64, of this rank's tokens, in order; padding has the last token's.
        real: [B, padded] bool: positions that others may attend to; None: all.
        unreal_last: Whether what isn't real comes after all that is, where causal attention doesn't look.
    """

    ring: Ring
    length: int
    positions: Tensor
    real: Tensor | None = None
    unreal_last: bool = False

    @property
    def chunk(self) -> int:
        """Positions of one chunk."""
        return len(self.positions) // 2

    @property
    def own(self) -> int:
        """Positions that this rank has."""
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


_divided: ForwardMode | None = None  # of the forward that runs: `positions` is called without its model


def set_current(mode: ForwardMode | None) -> None:
    """Set whose sequences `current` and `positions` are about: the mode of the model that runs; None: of none."""
    global _divided
    _divided = mode


def current() -> SequencePartition | None:
    """Return how sequences are divided in the forward or backward that runs; None: they are whole."""
    return None if _divided is None else _divided.sequences


def positions(length: int, device: torch.device | str | None = None) -> Tensor:
    """Return where a model's `length` tokens are in their sequences: [length] int64.

    They are 0, 1, 2, ..., unless `parallel.context` divides sequences over ranks, each of which then has tokens from
    two places. A model that calls this in place of `torch.arange(length)` can be trained under context parallelism.
    """
    division = current()
    if division is None:
        return torch.arange(length, device=device)
    if length != division.own:
        raise RunFailed(
            f"the model asks for the positions of {length} tokens, and this rank has {division.own} of each sequence; "
            "parallel.context is for models whose layers all see the same tokens"
        )
    return division.positions
