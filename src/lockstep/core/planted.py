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
        first, end: Positions in the order of the run, `end` exclusive.
        fails: Returns whether the next read fails; may be called in any process.
    """

    first: int
    end: int
    fails: Callable[[], bool]


_planted: UnreadableSamples | None = None


def plant_unreadable(samples: UnreadableSamples | None) -> None:
    """Make reads of samples fail in this process and its forks; None: none fails."""
    global _planted
    _planted = samples


def unreadable_samples() -> UnreadableSamples | None:
    return _planted


def raise_planted(position: int) -> None:
    """Raise if the samples at a position are planted ones. Called before samples are read."""
    if _planted is not None and _planted.first <= position < _planted.end and _planted.fails():
        raise PlantedReadError(errno.EIO, "planted: the sample can't be read")
