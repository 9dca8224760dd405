"""A sequence that is divided over ranks: which of its positions are whose.

    2 ranks, 8 positions     0 1 | 2 3 | 4 5 | 6 7        twice as many chunks as ranks, each rank has two: one from the
    belong to rank            0     1     1     0         front, one from the back; under causal attention, where later
                                                          positions see more, all ranks have as much to do

One division is current at a time, for a micro-batch's forward and its backward, in which blocks may be computed again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lockstep.core.errors import RunFailed
from lockstep.distributed.ring import Ring


@dataclass(frozen=True, slots=True, eq=False)
class SequencePartition:
    """Of the sequences of one micro-batch; all of them are as long.

    Attributes:
        ring: the ranks that have the same samples.
        length: of each sequence; filled up to a multiple of twice the ranks.
        positions: [own] int64, of this rank's tokens, in order; filler has the last token's.
        real: [B, filled] bool: whom others may look at; None: everybody.
        unreal_last: what isn't real comes behind all that is, where causal attention doesn't look.
    """

    ring: Ring
    length: int
    positions: Tensor
    real: Tensor | None = None
    unreal_last: bool = False

    @property
    def chunk(self) -> int:
        """Positions of one."""
        return len(self.positions) // 2

    @property
    def own(self) -> int:
        """Positions that this rank has."""
        return len(self.positions)


def filled(length: int, ranks: int) -> int:
    """The next length that divides into equal chunks."""
    return -(-length // (2 * ranks)) * 2 * ranks


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """One from the front, one from the back."""
    return rank, 2 * ranks - 1 - rank


def places_of(rank: int, ranks: int, length: int) -> Tensor:
    """[own] int64: where a rank's positions are in a sequence of `length`, which is filled up."""
    chunk = filled(length, ranks) // (2 * ranks)
    return torch.cat([torch.arange(one * chunk, (one + 1) * chunk) for one in chunks_of(rank, ranks)])


_current: SequencePartition | None = None


def current() -> SequencePartition | None:
    """How sequences are divided in the forward or backward that runs; None: they are whole."""
    return _current


def enter(division: SequencePartition | None) -> None:
    """From now on; None: sequences are whole again."""
    global _current
    _current = division


def positions(length: int, device: torch.device | str | None = None) -> Tensor:
    """Where a model's `length` tokens are in their sequences: [length] int64.

    0, 1, 2, ..., unless `parallel.context` divides sequences over ranks, each of which then has tokens from two places.
    A model that writes this where it would write `torch.arange(length)` can be trained under context parallelism.
    """
    division = _current
    if division is None:
        return torch.arange(length, device=device)
    if length != division.own:
        raise RunFailed(
            f"the model asks for the positions of {length} tokens, and this rank has {division.own} of each sequence; "
            "parallel.context is for models whose layers all see the same tokens"
        )
    return division.positions
