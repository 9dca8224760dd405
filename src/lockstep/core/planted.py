"""An error of reading samples that `lockstep chaos` plants in a rank, before its workers are forked."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass


class PlantedReadError(OSError):
    """The exception of a fault of kind `sample`."""


@dataclass(frozen=True, slots=True)
class UnreadableSamples:
    """Samples of a run that can't be read, once.

    Attributes:
        first, end: Positions in the order of the run, from `first` up to `end`, exclusive.
        fails: Returns whether a read of them fails, which is about to happen; may be called in any process.
    """

    first: int
    end: int
    fails: Callable[[], bool]


_planted: UnreadableSamples | None = None


def plant_unreadable(samples: UnreadableSamples | None) -> None:
    """Make a read of samples fail in this process, and in those that are forked from it; None: none fails."""
    global _planted
    _planted = samples


def unreadable_samples() -> UnreadableSamples | None:
    """Return what was planted in this process."""
    return _planted


def raise_planted(position: int) -> None:
    """Raise if the samples at a position are planted ones, and their read fails. Called before samples are read."""
    if _planted is not None and _planted.first <= position < _planted.end and _planted.fails():
        raise PlantedReadError(errno.EIO, "planted: the sample can't be read")
