"""The stages of reading samples are timed where they can be seen, and the source is as before afterwards."""

from __future__ import annotations

import time
from typing import Any, cast

import numpy as np
import pytest
import torch
from kit import small
from torch.utils.data import Subset

from lockstep.core.protocols import Source
from lockstep.core.records import Batch
from lockstep.data.custom import adapt_dataset
from lockstep.data.huggingface import TextSource
from lockstep.data.sources import PreparedSource
from lockstep.data.stages import StageTimes, TimeIsUp, stages_timed

THREE = np.array([4, 0, 2])


class Images:
    def __init__(self) -> None:
        self.transform = lambda value: (time.sleep(0.004), value)[1]

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        time.sleep(0.002)
        return self.transform(torch.tensor(float(index))), index


class WithSlots:
    __slots__ = ("transform",)

    def __init__(self) -> None:
        self.transform = float

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return self.transform(index), index


class Tokenizer:
    pad_token_id = 0

    def __len__(self) -> int:
        return 3


class Rows:
    """As `Texts`, without a tokenizer's cost."""

    rows = range(6)

    def __init__(self) -> None:
        self.tokenizer = Tokenizer()

    def at(self, indices: Any) -> Any:
        time.sleep(0.002)
        return indices

    def padded(self, texts: Any) -> Any:
        time.sleep(0.004)
        return texts

    def fingerprint(self, kind: str) -> str:
        return kind


def _times(source: Source, deadline: float = float("inf")) -> StageTimes:
    times = StageTimes(deadline)
    with stages_timed(source, times):
        source.fetch(THREE)
    return times


def test_items_transforms_and_collate() -> None:
    source = adapt_dataset(
        Subset(cast("Any", Images()), [5, 4, 3, 2, 1]), lambda items: (torch.zeros(1), torch.zeros(1))
    )
    times = _times(source)
    assert [index for index, _ in times.items] == [4, 0, 2]
    assert 0.006 <= times.seconds["reading"] < times.seconds["transform"]
    assert times.seconds["transform"] >= 0.012
    assert times.seconds["collate"] < 0.006
    assert sum(seconds for _, seconds in times.items) == pytest.approx(
        times.seconds["reading"] + times.seconds["transform"], rel=0.2
    )
    before = len(times.items)
    source.fetch(THREE)
    assert len(times.items) == before, "nothing is timed any more"


def test_what_cannot_be_replaced_is_not_timed() -> None:
    assert _times(adapt_dataset(WithSlots())).seconds.keys() >= {"reading", "collate"}
    assert not _times(adapt_dataset(small.points())).seconds


def test_preparations_and_texts() -> None:
    rows = Rows()
    source = TextSource(
        cast("Any", rows), "texts", lambda indices: Batch({"tokens": rows.padded(rows.at(indices))}, None, 3, 3)
    )
    times = _times(PreparedSource(source, lambda batch: batch))
    assert times.seconds.keys() == {"transform", "reading", "tokenize"}
    assert times.seconds["tokenize"] >= 0.004 > times.seconds["transform"]


def test_a_deadline_ends_the_reading() -> None:
    with pytest.raises(TimeIsUp):
        _times(adapt_dataset(WithSlots()), deadline=time.perf_counter() - 1)
