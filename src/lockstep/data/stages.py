"""Times the stages of reading samples, where they can be seen: the items of a dataset, its transform, the collate.

ItemSource    read [3] read [7] read [1] | collate        each item by itself, without its transform
Texts         read rows, tokenize
others        nothing: a fetch is a single stage
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

from torch.utils.data import Subset

from lockstep.core.protocols import Source
from lockstep.data.bad_samples import SkippingSource
from lockstep.data.custom import ItemSource
from lockstep.data.huggingface import TextSource
from lockstep.data.sources import PreparedSource

_TRANSFORMS = ("transform", "target_transform", "transforms")  # as torchvision's datasets name them
_MOST_NESTED = 8


class TimeIsUp(BaseException):
    """The time for reading samples is over. No `except Exception` of a dataset catches it."""


@dataclass(slots=True)
class StageTimes:
    """Seconds by stage, without those of stages within it; and of items by index.

    Attributes:
        deadline: On time.perf_counter; the next item after it raises TimeIsUp.
        items: (index, seconds) of each item that was read, with its transform.
    """

    deadline: float
    seconds: dict[str, float] = field(default_factory=dict)
    items: list[tuple[int, float]] = field(default_factory=list)
    _inner: list[float] = field(default_factory=list)

    def timed(self, stage: str, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Call a function, and count its time as a stage's."""
        began = time.perf_counter()
        self._inner.append(0.0)
        try:
            return function(*arguments, **options)
        finally:
            seconds, inner = time.perf_counter() - began, self._inner.pop()
            self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds - inner
            if self._inner:
                self._inner[-1] += seconds


class _TimedItems:
    def __init__(self, dataset: Any, times: StageTimes) -> None:
        self._dataset = dataset
        self._times = times

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        began = time.perf_counter()
        if began > self._times.deadline:
            raise TimeIsUp
        item = self._times.timed("reading", self._dataset.__getitem__, index)
        self._times.items.append((index, time.perf_counter() - began))
        return item

    def __getitems__(self, indices: Sequence[int]) -> Any:
        dataset = self._dataset
        if isinstance(dataset, Subset) and not callable(getattr(type(dataset.dataset), "__getitems__", None)):
            return [self[index] for index in indices]  # as it does itself
        return self._times.timed("reading", self._dataset.__getitems__, indices)


@contextmanager
def stages_timed(source: Source, times: StageTimes) -> Iterator[None]:
    """Time the stages of a source in this process while the block runs."""
    with ExitStack() as stack:

        def watch(owner: Any, name: str, stage: str) -> None:
            function = getattr(owner, name)

            def timed(*arguments: Any, **options: Any) -> Any:
                return times.timed(stage, function, *arguments, **options)

            with suppress(AttributeError, TypeError):  # of a class with slots, or a property
                stack.enter_context(patch.object(owner, name, timed))

        while isinstance(source, PreparedSource | SkippingSource):
            if isinstance(source, PreparedSource):
                watch(source, "prepare", "transform")
            source = source.source
        match source:
            case ItemSource():
                for dataset in _nested(source.dataset):
                    for name in _TRANSFORMS:
                        if callable(getattr(dataset, name, None)):
                            watch(dataset, name, "transform")
                stack.enter_context(patch.object(source, "dataset", _TimedItems(source.dataset, times)))
                watch(source, "collate", "collate")
            case TextSource():
                watch(source.texts, "at", "reading")
                watch(source.texts, "padded", "tokenize")
        yield


def _nested(dataset: Any) -> Iterator[Any]:
    for _ in range(_MOST_NESTED):
        yield dataset
        dataset = getattr(dataset, "dataset", None)
        if dataset is None:
            return
