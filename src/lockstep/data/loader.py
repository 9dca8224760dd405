"""The batches of a run, as a function of the number of samples consumed: the cursor, the only state.

    cursor --> epoch, position --> the update's samples --> this rank's share --> micro-batches
               divmod              order (keyed)            plan/batch            fetched, moved to the device

    update 7 of rank 1:   [ . . . . | x x x | . . . ]      positions k*G .. (k+1)*G of the epoch's order
                                      x x | x              its micro-batches

On a GPU the copy of the next item overlaps with the computation, on a separate stream:

    host      fetch k+1, pin, queue its copy | yield k | fetch k+2 ...
    copies          ............ k+1 .........
    compute   ... k-1 ...        |    ... k ...
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, tee
from operator import attrgetter
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from lockstep.config.data_sections import Data
from lockstep.config.schema import Loader
from lockstep.core.errors import ConfigError
from lockstep.core.keys import key
from lockstep.core.progress import Progress
from lockstep.core.protocols import Source
from lockstep.core.records import Batch, GlobalBatch, LeftOutSample
from lockstep.data.bad_samples import positioned, sum_of_digests
from lockstep.data.fetching import FetchRequest, Workers, fetch, fetch_all
from lockstep.data.order import SampleOrder, digests
from lockstep.data.sources import skipping_part
from lockstep.plan.batch import BatchPlan, micro_ranges

_REQUESTS = attrgetter("requests")
_BLOCK = 4096  # positions computed at once: 0.04 us each; 8 us each for a single batch of 8


@dataclass(slots=True)
class _Share:
    requests: list[FetchRequest]
    samples: int
    epoch: int
    cursor: int
    step: int
    digest: int


class TrainingLoader:
    """The endless stream of updates of one rank of the data axis. Raises ConfigError if there are no samples.

    Args:
        section: How it is shuffled and loaded.
        count: Returns the number of valid targets of a micro-batch on the CPU.

    Attributes:
        epoch_samples: Samples of an epoch; with `drop_last`, those that fill global batches.
    """

    def __init__(
        self,
        source: Source,
        batch: BatchPlan,
        rank: int,
        seed: int,
        section: Data,
        device: torch.device,
        count: Callable[[Batch], float],
    ) -> None:
        samples = source.facts.samples
        self.epoch_samples = _epoch_samples(samples, batch.global_size, section.drop_last)
        self._source = source
        self._skipping = skipping_part(source)
        self._batch = batch
        self._rank = rank
        self._seed = seed
        self._order = SampleOrder(samples, seed, shuffle=section.shuffle)
        self._options = section.loader
        self._device = device
        self._count = count
        self._workers = _workers(section.loader, device, key(seed, "workers", rank))
        self._running: Generator[GlobalBatch, None, None] | None = None

    def updates(self, progress: Progress) -> Iterator[GlobalBatch]:
        """Yield the updates after `progress`, without end; close the iterator of an earlier call. Raises RunFailed."""
        self.close()
        self._running = self._epochs(progress)
        return self._running

    def requests(self, progress: Progress) -> Iterator[FetchRequest]:
        """Yield what this rank fetches after `progress`, micro-batch by micro-batch, without end."""
        shares = self._shares(progress.steps, progress.samples, None)
        return (request for share in shares for request in share.requests)

    def micro_batches(self, progress: Progress) -> Iterator[Batch]:
        """Yield the micro-batches after `progress` one by one, on the CPU, without end; raises as `updates` does."""
        return fetch_all(self._source, self.requests(progress), self._workers)

    def own_samples(self, progress: Progress) -> list[list[int]]:
        """Return this rank's samples of the update after `progress`, by micro-batch; none of padding."""
        requests = next(self._shares(progress.steps, progress.samples, None)).requests
        return [[] if request.is_padding else request.indices.tolist() for request in requests]

    def samples_between(self, first: int, last: int) -> list[int]:
        """Return the samples of all ranks at the positions `first` to `last`, exclusive."""
        samples: list[int] = []
        while first < last:
            epoch, start = divmod(first, self.epoch_samples)
            stop = min(start + last - first, self.epoch_samples)
            samples += self._order.indices(epoch, np.arange(start, stop)).tolist()
            first += stop - start
        return samples

    def positions_of(self, step: int) -> tuple[int, int]:
        """Return the first position of update `step`, from 1, and the one after its last, at this global batch."""
        size = self._batch.global_size
        epoch, number = divmod(step - 1, -(-self.epoch_samples // size))
        first = number * size
        end = min(first + size, self.epoch_samples)
        return epoch * self.epoch_samples + first, epoch * self.epoch_samples + end

    def position_before(self, position: int, updates: int) -> int:
        """Return where the last `updates` updates before `position` began, at this global batch."""
        size = self._batch.global_size
        for _ in range(updates):
            if position <= 0:
                break
            epoch_start = (position - 1) // self.epoch_samples * self.epoch_samples
            position = epoch_start + (position - epoch_start - 1) // size * size
        return max(0, position)

    def close(self) -> None:
        """Stop the workers."""
        if self._running is not None:
            self._running.close()
            self._running = None

    def _epochs(self, progress: Progress) -> Generator[GlobalBatch, None, None]:
        steps, cursor = progress.steps, progress.samples
        while True:
            stop = None
            if self._options.workers and not self._options.persistent_workers:
                stop = (cursor // self.epoch_samples + 1) * self.epoch_samples
            updates = self._fetched(self._shares(steps, cursor, stop))
            for update in to_device(updates, self._device, self._workers.pin):
                yield update
                steps, cursor = update.step + 1, update.cursor

    def _fetched(self, shares: Iterator[_Share]) -> Iterator[GlobalBatch]:
        prefetched, shares = tee(shares)  # workers read requests ahead of the updates that are delivered
        requests: Iterator[FetchRequest] = chain.from_iterable(map(_REQUESTS, prefetched))
        if (skipping := self._skipping) is not None:
            requests = (
                request._replace(left_out=reasons) if (reasons := skipping.reasons(request.indices)) else request
                for request in requests
            )
        batches = fetch_all(self._source, requests, self._workers)
        for share in shares:
            yield self._update(share, tuple([next(batches) for _ in share.requests]))

    def _update(self, share: _Share, batches: Sequence[Batch]) -> GlobalBatch:
        count, tokens = 0.0, 0
        left_out: tuple[LeftOutSample, ...] = ()
        if (skipping := self._skipping) is not None:
            pairs = zip(batches, share.requests, strict=True)
            batches = [  # what a worker didn't know to be left out is fetched again
                batch
                if request.is_padding or skipping.lacks(request.indices, batch.left_out)
                else fetch(self._source, request)
                for batch, request in pairs
            ]
        for batch, request in zip(batches, share.requests, strict=True):
            if batch.samples:
                count += self._count(batch)
                tokens += batch.tokens
            if batch.left_out:
                left_out += positioned(batch.left_out, request.indices, request.position)
        used = share.digest - sum_of_digests(share.epoch, left_out) if left_out else share.digest
        return GlobalBatch(
            tuple(batches), share.samples, count, tokens, share.epoch, share.cursor, share.step, used, left_out
        )

    def _shares(self, step: int, cursor: int, stop: int | None) -> Iterator[_Share]:
        while cursor != stop:
            epoch, position = divmod(cursor, self.epoch_samples)
            left = self.epoch_samples - position
            size = min(self._batch.global_size, left)
            for share in self._block(epoch, position, size, left // size, step, cursor):
                yield share
                step, cursor = share.step + 1, share.cursor

    def _block(self, epoch: int, position: int, size: int, most: int, step: int, cursor: int) -> Iterator[_Share]:
        """Yield the shares of at most `most` updates of `size` samples each, which begin at `position`."""
        ranges = self._batch.ranges(size, self._rank)
        # an empty micro-batch is padded with the update's first sample, which is real data and known to every rank
        offsets = np.concatenate(
            [np.arange(start, stop) if stop > start else np.zeros(1, int) for start, stop in ranges]
        )
        firsts = position + size * np.arange(max(1, min(most, _BLOCK // len(offsets))))
        indices = self._order.indices(epoch, firsts[:, None] + offsets)
        is_padding = [stop == start for start, stop in ranges]
        widths = [max(1, stop - start) for start, stop in ranges]
        places = np.cumsum([0, *widths]).tolist()  # of the micro-batches in the rank's row of indices
        # micro-batches that are the same on any number of ranks have the same generators, too
        owner, first = (0, self._batch.share(size, self._rank).first) if self._batch.fixed else (self._rank, 0)
        epoch_key = key(self._seed, "noise", epoch)
        counted = np.repeat(np.logical_not(is_padding), widths)
        for row, digest in zip(indices, digests(epoch, indices, counted), strict=True):
            cursor += size
            requests = []
            for micro, padding in enumerate(is_padding):
                seed = key(self._seed, "augmentation", step, owner, first + micro) if self._source.draws else None
                start = cursor - size + ranges[micro][0]
                requests.append(FetchRequest(row[places[micro] : places[micro + 1]], padding, epoch_key, seed, start))
            yield _Share(requests, size, epoch, cursor, step, digest)
            step += 1


def first_batch(source: Source, samples: int, device: torch.device | None = None) -> Batch:
    """Return the first samples as a batch; on the CPU unless a device is given."""
    return next(evaluation_batches(source, samples, 0, 1, Loader(), device or torch.device("cpu")))


def evaluation_batches(
    source: Source,
    micro_size: int,
    rank: int,
    ranks: int,
    options: Loader,
    device: torch.device,
    first: int | None = None,
) -> Iterator[Batch]:
    """Yield this rank's batches of a whole dataset: all ranks have as many, and each sample is in one of them.

    A rank with fewer samples gets padding batches. The draws are the same in every evaluation. `first` takes only as
    many samples. Raises ConfigError if there are no samples; RunFailed during iteration.
    """
    samples = min(_epoch_samples(source.facts.samples, 1, drop_last=False), first or source.facts.samples)
    requests = (
        FetchRequest(
            np.arange(start, stop) if stop > start else np.zeros(1, np.int64),
            stop == start,
            key(0, "evaluation"),
            key(0, "evaluation", start) if source.draws else None,
            evaluates=True,
        )
        for start, stop in micro_ranges(samples, micro_size, rank, ranks)
    )
    workers = _workers(options, device, key(0, "evaluation", rank))
    return to_device(fetch_all(source, requests, workers), device, workers.pin)


def _epoch_samples(samples: int, global_size: int, drop_last: bool) -> int:
    if samples < 1:
        raise ConfigError("the dataset is empty")
    if not drop_last:
        return samples
    if samples < global_size:
        remedy = f"set batch.global_size to {samples} at most, or drop_last to false"
        raise ConfigError(f"data.drop_last leaves no data: {samples} samples, {global_size} a batch; {remedy}")
    return samples // global_size * global_size


def _workers(options: Loader, device: torch.device, workers_key: int) -> Workers:
    on_accelerator = device.type != "cpu"
    if options.pin_memory is True and not on_accelerator:
        raise ConfigError(f"data.loader.pin_memory is for accelerators, and this rank computes on {device}; set auto")
    return Workers(options.workers, options.prefetch, options.pin_memory is not False and on_accelerator, workers_key)


Item = TypeVar("Item", Batch, GlobalBatch)


def to_device(items: Iterator[Item], device: torch.device, pin: bool) -> Iterator[Item]:
    """Yield the items with their tensors on `device`."""
    if device.type == "cpu":
        return items
    return _overlapped(items, device, pin)


def map_tensors(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    """Return `value` with `function` applied to each tensor in it: in records, mappings, tuples and lists."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, GlobalBatch):
        return replace(value, micro_batches=map_tensors(value.micro_batches, function))
    if isinstance(value, Batch):
        mapped = {"inputs": map_tensors(value.inputs, function), "targets": map_tensors(value.targets, function)}
        if value.companion is not None:
            mapped["companion"] = map_tensors(value.companion, function)
        return replace(value, **mapped)
    if isinstance(value, Mapping):
        return {name: map_tensors(part, function) for name, part in value.items()}
    if isinstance(value, tuple | list):
        parts = [map_tensors(part, function) for part in value]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def _overlapped(items: Iterator[Item], device: torch.device, pin: bool) -> Iterator[Item]:
    module = torch.get_device_module(device)
    copies = module.Stream(device)

    def copied(tensor: Tensor) -> Tensor:
        host = tensor.pin_memory() if pin and not tensor.is_pinned() else tensor
        return host.to(device, non_blocking=True)

    def start(item: Item) -> tuple[Item, torch.Event]:
        with module.stream(copies):
            return map_tensors(item, copied), copies.record_event()

    def arrived(item: Item, event: torch.Event) -> Item:
        compute = module.current_stream(device)
        compute.wait_event(event)

        def record_use(tensor: Tensor) -> Tensor:  # later copies don't get its memory before `compute` has used it
            tensor.record_stream(compute)
            return tensor

        return map_tensors(item, record_use)  # type: ignore[no-any-return]

    pending: tuple[Item, torch.Event] | None = None
    for item in items:
        following = start(item)
        if pending is not None:
            yield arrived(*pending)
        pending = following
    if pending is not None:
        yield arrived(*pending)
