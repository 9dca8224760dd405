"""The items of a dataset are timed while they are read, and the source is as before afterwards."""

from __future__ import annotations

import time
from typing import Any, cast

import numpy as np
import pytest
import torch
from kit import small
from torch.utils.data import Subset

from lockstep.core.protocols import Source
from lockstep.data.custom import adapt_dataset
from lockstep.data.sources import PreparedSource
from lockstep.profiling.loading import TimeIsUp, items_timed

THREE = np.array([4, 0, 2])


class Images:
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return torch.tensor(float(index)), index


def _times(source: Source, deadline: float = float("inf")) -> list[tuple[int, float]]:
    with items_timed(source, deadline) as items:
        source.fetch(THREE)
    return items


def test_items_are_timed_one_by_one() -> None:
    source = PreparedSource(adapt_dataset(Subset(cast("Any", Images()), [5, 4, 3, 2, 1])), lambda batch: batch)
    items = _times(source)
    assert [index for index, _ in items] == [4, 0, 2]
    assert all(seconds >= 0.002 for _, seconds in items)
    source.fetch(THREE)
    assert len(items) == 3, "nothing is timed any more"


def test_tensors_have_no_items() -> None:
    assert not _times(adapt_dataset(small.points()))


def test_a_deadline_ends_the_reading() -> None:
    with pytest.raises(TimeIsUp):
        _times(adapt_dataset(Images()), deadline=time.perf_counter() - 1)
