"""The fingerprint of a user's dataset, as a whole and in parts: a sample that isn't read doesn't make it other data.

whole    a hash of the code, the length, and of items from the first to the last
parts    code, length     item 0     item 21   ...   item 319
         a hash           a hash     a hash          None: left out, or unreadable
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lockstep.core.extensions import source_file
from lockstep.data import noise
from lockstep.data.order import Indices
from lockstep.data.unreadable import note_sample, read_or_explain
from lockstep.data.weighted import WeightedDataset
from lockstep.data.windows import fingerprint

_ITEMS = 16
_UNREADABLE = "unreadable"


class ItemFingerprint(NamedTuple):
    """The hashes of a dataset.

    Attributes:
        parts: The first is of its code and length, each other one of an item; None: it wasn't read.
    """

    whole: str
    parts: tuple[str | None, ...]


class NotRead(Exception):
    """An item is left out, or can't be read."""


def fingerprint_of_items(dataset: Any, collate: Any, read: Callable[[int], Any]) -> ItemFingerprint:
    """Return the fingerprint of a map-style dataset.

    Args:
        collate: The user's collate function, if any.
        read: Returns an item, or raises NotRead.

    Raises:
        UnusableSamples: An item can't be read; it names the sample.
    """
    module = type(dataset).__module__.replace("__mp_main__", "__main__")  # as ranks that aren't forked import a script
    kind = f"{module}.{type(dataset).__qualname__}"
    inner = dataset.dataset if isinstance(dataset, WeightedDataset) else dataset
    code = [_source_hash(part) for part in (inner, collate) if part is not None]
    code += [fingerprint(dataset.weights)] if inner is not dataset else []
    noise.use_epoch(0)
    with noise.keyed_generators(0):  # random items are the same each time
        items = read_or_explain(lambda indices: [*_items(indices, read)], spread(len(dataset)))
    whole = fingerprint(kind, len(dataset), code, [contents for contents, _ in items])
    return ItemFingerprint(whole, (fingerprint(kind, len(dataset), code), *(part for _, part in items)))


def _items(indices: Indices, read: Callable[[int], Any]) -> Iterator[tuple[Any, str | None]]:
    """Yield what the fingerprint covers of each item, and its part."""
    for index in indices.tolist():
        before = noise.generator_states()
        try:
            item = contents = covered(read(index))
            if noise.has_drawn(before):  # it depends on how many items were read before this one
                with noise.keyed_generators(index):
                    item = covered(read(index))
        except NotRead:
            yield _UNREADABLE, None
        except Exception as error:
            note_sample(error, index)
            raise
        else:
            yield contents, fingerprint(item)


def spread(samples: int) -> Indices:
    """Return up to 16 indices, from the first to the last."""
    if samples == 0:
        return np.zeros(0, np.int64)
    return np.unique(np.linspace(0, samples - 1, _ITEMS).astype(np.int64))


def _source_hash(part: Any) -> str:
    path = source_file(part)
    return fingerprint(path.read_bytes()) if path is not None and os.path.isfile(path) else ""


def covered(item: Any) -> Any:
    """Return what a fingerprint covers of an item: its values, and no memory addresses."""
    if isinstance(item, Tensor):
        return fingerprint(item.detach().cpu().contiguous().view(torch.uint8).numpy() if item.dim() else item.item())
    if isinstance(item, np.ndarray):
        return fingerprint(item) if item.dtype != object else [covered(part) for part in item.tolist()]
    if isinstance(item, Mapping):
        return [(str(name), covered(part)) for name, part in item.items()]
    if isinstance(item, tuple | list):
        return [covered(part) for part in item]
    if isinstance(item, str | bytes | int | float | bool | None):
        return item
    return type(item).__qualname__
