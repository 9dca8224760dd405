"""An error of reading samples that `lockstep chaos` plants in a process."""

from __future__ import annotations

import errno

_planted: list[Exception] = []


class PlantedReadError(OSError):
    """The exception of a fault of kind `sample`."""


def plant_unreadable() -> None:
    """Make the next read of samples in this process fail."""
    _planted.append(PlantedReadError(errno.EIO, "planted: the sample can't be read"))


def raise_planted() -> None:
    """Raise what `plant_unreadable` has planted, once. Called before samples are read."""
    if _planted:
        raise _planted.pop()
