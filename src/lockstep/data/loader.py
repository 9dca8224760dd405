"""The batches that follow a cursor.

    cursor --> epoch, position --> the update's samples --> this rank's share --> micro-batches
               divmod              order (keyed)            plan/batch            fetched, moved to the device

    update 7 of rank 1:   [ . . . . | x x x | . . . ]      positions k*G .. (k+1)*G of the epoch's order
                                      x x | x              its micro-batches

The only state is the number of samples consumed.

On a GPU the copy of the next item runs on a separate stream beside the computation:

    host      fetch k+1, pin, queue its copy | yield k | fetch k+2 ...
    copies          ............ k+1 .........
    compute   ... k-1 ...        |    ... k ...
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import tee
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from lockstep.config.schema import Loader
from lockstep.core.errors import ConfigError
from lockstep.core.keys import key
from lockstep.core.progress import Progress
from lockstep.core.protocols import Source
from lockstep.core.records import Batch, GlobalBatch
from lockstep.data.fetching import FetchRequest, Workers, fetch, fetch_all
from lockstep.data.order import SampleOrder, digests
from lockstep.plan.batch import BatchPlan, micro_ranges

_BLOCK = 4096  # positions whose order is computed at a time: 0.04 us each; a batch of 8 alone would cost 8 us each


@dataclass(slots=True)
class _Share:
    """The part of an update that this rank fetches."""

    requests: list[FetchRequest]
    samples: int
    epoch: int
    cursor: int
    step: int
    digest: int


class TrainingLoader:
    """The endless stream of updates of one rank of the data axis.

    Args:
        count: micro-batch on the CPU -> its valid targets.

    Attributes:
        epoch_samples: samples of an epoch; with `drop_last`, those that fill global batches.

    Raises:
        ConfigError: no samples, or none left with `drop_last`.
    """

    def __init__(
        self,
        source: Source,
        batch: BatchPlan,
        rank: int,
        seed: int,
        *,
        shuffle: bool,
        drop_last: bool,
        options: Loader,
        device: torch.device,
        count: Callable[[Batch], float],
    ) -> None:
        samples = source.facts.samples
        self.epoch_samples = _epoch_samples(samples, batch.global_size, drop_last)
        self._source = source
        self._batch = batch
        self._rank = rank
        self._seed = seed
        self._order = SampleOrder(samples, seed, shuffle=shuffle)
        self._options = options
        self._device = device
        self._count = count
        self._workers = _workers(options, device, key(seed, "workers", rank))
        self._running: Generator[GlobalBatch, None, None] | None = None

    def updates(self, progress: Progress) -> Iterator[GlobalBatch]:
        """Yield the updates after `progress`, without end; an iterator returned before ends.

        Raises:
            RunFailed: while it is read; a sample can't be read, or a worker died.
        """
        self.close()
        self._running = self._epochs(progress)
        return self._running

    def close(self) -> None:
        """End the workers."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def _epochs(self, progress: Progress) -> Generator[GlobalBatch, None, None]:
        """Yield updates from one set of workers for all epochs, unless `persistent_workers` is off."""
        steps, cursor = progress.steps, progress.samples
        while True:
            stop = None
            if self._options.workers and not self._options.persistent_workers:
                stop = (cursor // self.epoch_samples + 1) * self.epoch_samples
            shares = self._shares(steps, cursor, stop)
            updates = self._from_workers(shares) if self._workers.number else self._in_process(shares)
            for update in to_device(updates, self._device, self._workers.pin):
                yield update
                steps, cursor = update.step + 1, update.cursor

    def _in_process(self, shares: Iterator[_Share]) -> Iterator[GlobalBatch]:
        for share in shares:
            yield self._update(share, [fetch(self._source, request) for request in share.requests])

    def _from_workers(self, shares: Iterator[_Share]) -> Iterator[GlobalBatch]:
        ahead, shares = tee(shares)  # workers are asked ahead of what is delivered
        requests = (request for share in ahead for request in share.requests)
        batches = fetch_all(self._source, requests, self._workers)
        for share in shares:
            yield self._update(share, [next(batches) for _ in share.requests])

    def _update(self, share: _Share, micro_batches: list[Batch]) -> GlobalBatch:
        count, tokens = 0.0, 0
        for batch in micro_batches:
            if batch.samples:
                count += self._count(batch)
                tokens += batch.tokens
        return GlobalBatch(
            tuple(micro_batches), share.samples, count, tokens, share.epoch, share.cursor, share.step, share.digest
        )

    def _shares(self, step: int, cursor: int, stop: int | None) -> Iterator[_Share]:
        """Yield the shares from `cursor` on, in blocks of equal updates; up to the cursor `stop`."""
        while cursor != stop:
            epoch, position = divmod(cursor, self.epoch_samples)
            left = self.epoch_samples - position
            size = min(self._batch.global_size, left)
            for share in self._block(epoch, position, size, left // size, step, cursor):
                yield share
                step, cursor = share.step + 1, share.cursor

    def _block(self, epoch: int, position: int, size: int, most: int, step: int, cursor: int) -> Iterator[_Share]:
        """Yield updates of `size` samples each from `position` on: `most` of them, or as many as make a block."""
        ranges = self._batch.ranges(size, self._rank)
        # filler is the update's first sample: every rank has one at hand, and it is real data
        offsets = np.concatenate(
            [np.arange(start, stop) if stop > start else np.zeros(1, int) for start, stop in ranges]
        )
        firsts = position + size * np.arange(max(1, min(most, _BLOCK // len(offsets))))
        indices = self._order.indices(epoch, firsts[:, None] + offsets)
        slices = _slices(ranges)
        owner, first = (0, self._batch.share(size, self._rank).first) if self._batch.fixed else (self._rank, 0)
        epoch_key = key(self._seed, "noise", epoch)
        own = np.concatenate([np.full(max(stop - start, 1), stop > start) for start, stop in ranges])
        for row, digest in zip(indices, digests(epoch, indices, own), strict=True):
            cursor += size
            requests = [
                FetchRequest(row[start:stop], filler, epoch_key, self._generator_key(step, owner, first + micro))
                for micro, (start, stop, filler) in enumerate(slices)
            ]
            yield _Share(requests, size, epoch, cursor, step, digest)
            step += 1

    def _generator_key(self, step: int, owner: int, micro: int) -> int | None:
        """Return the seed of a micro-batch's generators.

        Args:
            owner: the rank; 0 for micro-batches that are the same on any number of ranks.
        """
        return key(self._seed, "augmentation", step, owner, micro) if self._source.draws else None


def evaluation_batches(
    source: Source, micro_size: int, rank: int, ranks: int, options: Loader, device: torch.device
) -> Iterator[Batch]:
    """Yield this rank's part of the whole set: every sample once over all ranks, as many batches on each; filler where
    a rank has run out. The draws are the same in every evaluation.

    Raises:
        ConfigError: the set is empty.
        RunFailed: while it is read; a sample can't be read, or a worker died.
    """
    samples = _epoch_samples(source.facts.samples, 1, drop_last=False)
    requests = (
        FetchRequest(
            np.arange(start, stop) if stop > start else np.zeros(1, np.int64),
            stop == start,
            key(0, "evaluation"),
            key(0, "evaluation", start) if source.draws else None,
        )
        for start, stop in micro_ranges(samples, micro_size, rank, ranks)
    )
    workers = _workers(options, device, key(0, "evaluation", rank))
    return to_device(fetch_all(source, requests, workers), device, workers.pin)


def _epoch_samples(samples: int, global_size: int, drop_last: bool) -> int:
    if samples < 1:
        raise ConfigError("the data set is empty")
    if not drop_last:
        return samples
    if samples < global_size:
        raise ConfigError(
            f"data.drop_last leaves nothing: {samples} samples don't fill one batch.global_size of {global_size}; "
            f"batch.global_size can be {samples} at most, or drop_last false"
        )
    return samples // global_size * global_size


def _slices(ranges: list[tuple[int, int]]) -> list[tuple[int, int, bool]]:
    """Return the place of each micro-batch in the rank's row of indices, and whether it is filler."""
    slices, first = [], 0
    for start, stop in ranges:
        width = max(1, stop - start)
        slices.append((first, first + width, stop == start))
        first += width
    return slices


def _workers(options: Loader, device: torch.device, workers_key: int) -> Workers:
    on_gpu = device.type == "cuda"
    if options.pin_memory is True and not on_gpu:
        raise ConfigError(
            f"data.loader.pin_memory makes copies to a GPU faster, but this rank computes on {device}; auto does right"
        )
    return Workers(options.workers, options.prefetch, options.pin_memory is not False and on_gpu, workers_key)


Item = TypeVar("Item", Batch, GlobalBatch)


def to_device(items: Iterator[Item], device: torch.device, pin: bool) -> Iterator[Item]:
    """Yield the items with their tensors on `device`."""
    if device.type == "cpu":
        return items
    if device.type == "cuda":
        return _overlapped(items, device, pin)
    return (map_tensors(item, lambda tensor: tensor.to(device)) for item in items)


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return `value` with `function` applied to each tensor in it: in records, mappings, tuples and lists."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, GlobalBatch):
        return replace(value, micro_batches=map_tensors(value.micro_batches, function))
    if isinstance(value, Batch):
        return replace(value, inputs=map_tensors(value.inputs, function), targets=map_tensors(value.targets, function))
    if isinstance(value, Mapping):
        return {name: map_tensors(part, function) for name, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [map_tensors(part, function) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def _overlapped(items: Iterator[Item], device: torch.device, pin: bool) -> Iterator[Item]:
    copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def copied(tensor: Tensor) -> Tensor:
        host = tensor.pin_memory() if pin and not tensor.is_pinned() else tensor
        return host.to(device, non_blocking=True)

    def start(item: Item) -> tuple[Item, torch.cuda.Event]:
        with torch.cuda.stream(copies):
            return map_tensors(item, copied), copies.record_event()

    def arrived(item: Item, event: torch.cuda.Event) -> Item:
        compute = torch.cuda.current_stream(device)
        compute.wait_event(event)

        def used_by_compute(tensor: Tensor) -> Tensor:  # its memory is not given to a later copy before that is done
            tensor.record_stream(compute)
            return tensor

        return map_tensors(item, used_by_compute)  # type: ignore[no-any-return]

    ahead: tuple[Item, torch.cuda.Event] | None = None
    for item in items:
        following = start(item)
        if ahead is not None:
            yield arrived(*ahead)
        ahead = following
    if ahead is not None:
        yield arrived(*ahead)
