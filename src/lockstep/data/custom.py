"""A user's own data as a source: a map-style Dataset with a collate function, or an object that is a source already.

    item of the dataset       inputs of the model                   targets
    mapping                   all other keys, by name               its label, labels, target or targets
    tuple or list             all but the last, in order            the last; of a single one: none
    a tensor, or a number     itself                                none

Items are collated by the user's function, or by torch's with lists of numbers as tensors; then the batch is split as
above. Its samples are its rows: a function may leave items out. It may also return a lockstep Batch. A TensorDataset
isn't collated: each of its tensors is indexed once.

The fingerprint is a hash of code, length and some items.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, get_worker_info
from torch.utils.data._utils.collate import collate, collate_tensor_fn, default_collate_fn_map

from lockstep.config.data_sections import FATAL, BadSamples, CustomData
from lockstep.core import heartbeat
from lockstep.core.errors import ConfigError, RunFailed
from lockstep.core.extensions import construct, import_target, source_file
from lockstep.core.protocols import Source
from lockstep.core.records import TARGETS, Batch, DataFacts
from lockstep.data import noise
from lockstep.data.bad_samples import note_sample, read_or_explain, time_limit
from lockstep.data.order import Indices, fingerprint
from lockstep.data.weighted import WeightedDataset

Collate = Callable[[list[Any]], Any]


_DTYPE, _REQUIRES_GRAD = attrgetter("dtype"), attrgetter("requires_grad")
_MAPPING = (dict, Mapping)  # what nearly all are comes first: an abstract class asks Python
_ITEMS = 16
_UNREADABLE = "unreadable"


@dataclass(frozen=True, slots=True)
class ItemReading:
    """The way of reading a user's items: what a bad one does, which are left out, whether they are evaluated on."""

    bad_samples: BadSamples = FATAL
    leaves_out: Callable[[int], bool] = lambda index: False
    evaluates: bool = False


TRAINING = ItemReading()


def open_custom(section: CustomData, reading: ItemReading = TRAINING) -> Source:
    """Return the source that the section names. Raises ConfigError."""
    dataset = construct("sources", section.target, section.arguments)
    collate = import_target(section.collate) if section.collate else None
    if collate is not None and not callable(collate):
        raise ConfigError(f"{section.collate} is a {type(collate).__name__}, not a function that collates items")
    return adapt_dataset(dataset, collate, reading)


def adapt_dataset(dataset: Any, collate: Collate | None = None, reading: ItemReading = TRAINING) -> Source:
    """Return a source for a map-style Dataset: anything with `__len__` and `__getitem__`, such as a list.

    Args:
        dataset: Its `__getitems__` is used if its class defines it; a `Source` is returned as it is.
        collate: Makes a batch of items; None: torch's function.
    """
    if isinstance(dataset, Source):
        if collate is not None:
            raise ConfigError(f"{type(dataset).__name__} is a source, and its fetch collates; remove collate")
        return dataset
    dataset = dataset if collate is not None else _of_columns(dataset)
    _check_map_style(dataset)
    if type(dataset) is TensorDataset and collate is None:
        return TensorSource(dataset.tensors)
    return ItemSource(dataset, collate, reading)


def _of_columns(dataset: Any) -> Any:
    columns = list(dataset.values()) if isinstance(dataset, dict) else dataset
    if type(dataset) not in (tuple, dict) or not columns:
        return dataset
    if not all(isinstance(column, Tensor | np.ndarray) and column.ndim for column in columns):
        return dataset
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
        raise ConfigError(f"arrays of a dataset have a row for each sample, and these have {lengths} rows")
    tensors = [torch.as_tensor(column) for column in columns]
    return TensorDataset(*tensors) if isinstance(dataset, tuple) else _Columns(dict(zip(dataset, tensors, strict=True)))


class _Columns:
    def __init__(self, columns: dict[str, Tensor]) -> None:
        self._columns = columns

    def __len__(self) -> int:
        return len(next(iter(self._columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self._columns.items()}


def _check_map_style(dataset: Any) -> None:
    kind = type(dataset)
    if isinstance(dataset, str):
        raise ConfigError(f"the dataset is the text {dataset!r}; for a name, set data.train.kind: huggingface")
    if isinstance(dataset, DataLoader):
        raise ConfigError(
            "a DataLoader isn't a dataset; pass train_dataset=loader.dataset, and collate=loader.collate_fn if it has "
            "a custom one. batch.micro_size is its batch_size, data.loader.workers its num_workers, data.shuffle and "
            "lockstep.WeightedDataset replace samplers"
        )
    if isinstance(dataset, Mapping) and any(isinstance(key, str) for key in dataset):
        splits = ", ".join(map(str, dataset)) or "none"
        raise ConfigError(f"{kind.__name__} is a mapping of splits ({splits}); pass one of them: splits['train']")
    if isinstance(dataset, IterableDataset):
        raise ConfigError(
            f"{kind.__name__} is an IterableDataset, but a run reads samples in any order, so that it can resume on "
            "any number of ranks; pass a map-style Dataset, with __len__ and __getitem__"
        )
    if kind.__name__ == "DataFrame":
        raise ConfigError("a DataFrame isn't indexed by rows; pass a list of them: train_dataset=df.to_dict('records')")
    missing = [name for name in ("__len__", "__getitem__") if getattr(kind, name, None) is None]
    if missing:
        raise ConfigError(f"{kind.__name__} isn't a map-style Dataset: it has no {' and no '.join(missing)}")


class TensorSource:
    """Tensors [samples, ...] with a row for each sample; the last of several tensors is the target."""

    draws = False

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._tensors = [tensor.detach().cpu() for tensor in tensors]
        samples = len(self._tensors[-1])
        self.facts = DataFacts(samples, None)
        rows = torch.from_numpy(spread(samples))
        self.fingerprint = fingerprint("tensors", samples, *[covered(tensor[rows]) for tensor in self._tensors])

    def fetch(self, indices: Indices) -> Batch:
        samples = len(indices)
        places = torch.from_numpy(indices)
        rows = [tensor.index_select(0, places) for tensor in self._tensors]
        *inputs, targets = rows if len(rows) > 1 else (*rows, None)
        return Batch(tuple(inputs), targets, samples, samples)


class ItemSource:
    """Items of a dataset, which may draw random numbers."""

    draws = True

    def __init__(self, dataset: Any, collate: Collate | None, reading: ItemReading = TRAINING) -> None:
        self.dataset = dataset
        self.collate = collate or collate_values
        # looked up on the class: torch's Subset inherits nothing from the dataset that it wraps
        self._fetches_lists = callable(getattr(type(dataset), "__getitems__", None))
        self.facts = DataFacts(len(dataset), None)
        self._evaluates = reading.evaluates
        self.fingerprint = fingerprint_of_items(dataset, collate, lambda index: self._item(index, reading))

    def fetch(self, indices: Indices) -> Batch:
        numbers = indices.tolist()
        if self._fetches_lists:
            items = self.dataset.__getitems__(numbers)
        else:
            items = []
            slots, at = heartbeat.own().sample_slot()
            try:
                for index in numbers:
                    slots[at] = index + 1
                    items.append(self.dataset[index])
            except Exception as error:
                slots[at] = 0
                note_sample(error, index)
                raise
            slots[at] = 0
        return as_batch(self.collate(items), len(numbers))

    def _item(self, index: int, reading: ItemReading) -> Any:
        if reading.leaves_out(index):
            return _UNREADABLE
        skips, timeout = reading.bad_samples.skips, reading.bad_samples.timeout
        try:
            with heartbeat.reads(np.array([index]), self._evaluates), time_limit(timeout if skips else None):
                return self.dataset[index]
        except Exception as error:
            if skips:
                return _UNREADABLE
            note_sample(error, index)
            raise


def collate_values(items: list[Any]) -> Any:
    """Apply torch's collate function to the items, with lists of numbers as tensors, not transposed."""
    first = items[0]
    try:
        if not _has_list(first):
            if type(first) is dict:
                return {name: _column([item[name] for item in items]) for name in first}
            if type(first) is tuple and len(set(map(len, items))) == 1:
                return [*map(_column, zip(*items, strict=True))]
            return collate(items, collate_fn_map=_COLLATED)
    except (TypeError, AttributeError):
        if not any(map(_has_list, items)):
            raise
    return collate([*map(_with_tensors, items)], collate_fn_map=_COLLATED)


def _has_list(item: Any) -> bool:
    values = item.values() if isinstance(item, _MAPPING) else item if type(item) is tuple else ()
    return list in map(type, values)


def _with_tensors(item: Any) -> Any:
    if isinstance(item, Mapping):
        return {name: _as_tensor(value) for name, value in item.items()}
    return tuple(map(_as_tensor, item)) if type(item) is tuple else item


def _column(values: Sequence[Any]) -> Any:
    return _stacked(values) if isinstance(values[0], Tensor) else collate(values, collate_fn_map=_COLLATED)


def _stacked(tensors: Sequence[Tensor], *, collate_fn_map: Any = None) -> Any:
    """Stack tensors of one dtype, like torch: in a worker it would cast others, elsewhere promote them."""
    if len(set(map(_DTYPE, tensors))) > 1:
        dtypes = ", ".join(str(tensor.dtype) for tensor in tensors[:_ITEMS])
        raise TypeError(f"the samples of one batch are {dtypes}: return one dtype, or set collate")
    if any(map(_REQUIRES_GRAD, tensors)):
        raise TypeError("the dataset returned a tensor that requires a gradient: return tensor.detach()")
    if get_worker_info() is None:
        return torch.stack([*tensors])
    return collate_tensor_fn(tensors, collate_fn_map=collate_fn_map)  # in shared memory


_COLLATED = {**default_collate_fn_map, Tensor: _stacked}


def _as_tensor(value: Any) -> Any:
    first = value
    while isinstance(first, list) and first:  # only the first elements are looked at
        first = first[0]
    return torch.tensor(value) if isinstance(value, list) and isinstance(first, int | float) else value


def as_batch(collated: Any, samples: int) -> Batch:
    """Return the result of a collate function, split into inputs and targets."""
    if isinstance(collated, Batch):
        return collated
    if collated is None:
        raise RunFailed("the collate function returned None; set data.bad_samples: {policy: skip} to leave samples out")
    if isinstance(collated, _MAPPING):
        inputs = dict(collated)
        named = [name for name in TARGETS if name in inputs]
        if len(named) > 1:
            raise RunFailed(f"a batch has {' and '.join(named)}; only one of them can hold the targets")
        targets = inputs.pop(named[0]) if named else None
        samples = _rows(targets, *inputs.values(), otherwise=samples)
        ids, mask = inputs.get("input_ids"), inputs.get("attention_mask")
        tokens = ids.numel() if isinstance(ids, Tensor) else samples
        if isinstance(mask, Tensor):  # text as transformers' tokenizers return it
            tokens = int(mask.sum())
        return Batch(inputs, targets, samples, tokens)
    values = collated if isinstance(collated, tuple | list) else (collated,)
    *parts, targets = values if len(values) > 1 else (*values, None)
    samples = _rows(targets, *parts, otherwise=samples)
    return Batch(tuple(parts), targets, samples, samples)


def _rows(*parts: Any, otherwise: int) -> int:
    for part in parts:
        if isinstance(part, Tensor) and part.dim():
            return len(part)
        if isinstance(part, Mapping):
            return _rows(*part.values(), otherwise=otherwise)
        if isinstance(part, list | tuple) and part and not isinstance(part[0], Tensor | list | tuple):
            return len(part)
    return otherwise


def fingerprint_of_items(dataset: Any, collate: Any, read: Callable[[int], Any]) -> str:
    """Return the fingerprint of a map-style dataset; `read` returns its items. Raises UnusableSamples."""
    module = type(dataset).__module__.replace("__mp_main__", "__main__")  # as ranks that aren't forked import a script
    kind = f"{module}.{type(dataset).__qualname__}"
    inner = dataset.dataset if isinstance(dataset, WeightedDataset) else dataset
    paths = [source_file(part) for part in (inner, collate) if part is not None]
    code = [fingerprint(path.read_bytes()) if path is not None and path.is_file() else "" for path in paths]
    code += [fingerprint(dataset.weights)] if inner is not dataset else []
    noise.use_epoch(0)
    with noise.keyed_generators(0):  # random items are the same each time
        read_all = lambda indices: [covered(read(index)) for index in indices.tolist()]  # noqa: E731
        items = read_or_explain(read_all, spread(len(dataset)))
    return fingerprint(kind, len(dataset), code, items)


def spread(samples: int) -> Indices:
    """Return up to 16 indices, from the first to the last."""
    if samples == 0:
        return np.zeros(0, np.int64)
    return np.unique(np.linspace(0, samples - 1, _ITEMS).astype(np.int64))


def covered(item: Any) -> Any:
    """Return the part of an item that a fingerprint covers: its values, without memory addresses."""
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
