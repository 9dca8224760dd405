"""Times the items of a dataset while they are read, each by itself, up to a deadline."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from torch.utils.data import Subset

from lockstep.core.protocols import Source
from lockstep.data.bad_samples import SkippingSource
from lockstep.data.custom import ItemSource
from lockstep.data.sources import PreparedSource


class TimeIsUp(BaseException):
    """The time for reading samples is over. No `except Exception` of a dataset catches it."""


class _TimedItems:
    def __init__(self, dataset: Any, deadline: float) -> None:
        self._dataset = dataset
        self._deadline = deadline
        self.items: list[tuple[int, float]] = []

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        began = time.perf_counter()
        if began > self._deadline:
            raise TimeIsUp
        item = self._dataset[index]
        self.items.append((index, time.perf_counter() - began))
        return item

    def __getitems__(self, indices: Sequence[int]) -> Any:
        dataset = self._dataset
        if isinstance(dataset, Subset) and not callable(getattr(type(dataset.dataset), "__getitems__", None)):
            return [self[index] for index in indices]  # as it does itself
        return dataset.__getitems__(indices)


@contextmanager
def items_timed(source: Source, deadline: float) -> Iterator[list[tuple[int, float]]]:
    """Yield the list of (index, seconds) of the items that are read in the block; others than items aren't timed.

    Raises TimeIsUp if an item is read after the deadline, on time.perf_counter.
    """
    while isinstance(source, PreparedSource | SkippingSource):
        source = source.source
    if not isinstance(source, ItemSource):
        yield []
        return
    timed = _TimedItems(source.dataset, deadline)
    with patch.object(source, "dataset", timed):
        yield timed.items
