"""A source without the samples that can't be used: which are left out doesn't depend on the others in their batch."""

from __future__ import annotations

import signal
import time
from typing import Any

import numpy as np
import pytest
import torch
from index_sources import DrawingSource, IndexSource, make_loader
from kit.failures import fails, gives

from lockstep.config.data_sections import BadSamples
from lockstep.core.errors import RunFailed, Stopped
from lockstep.core.progress import Progress
from lockstep.core.records import Batch
from lockstep.data.bad_samples import SkippingSource
from lockstep.data.custom import adapt_dataset
from lockstep.data.noise import keyed_generators
from lockstep.data.order import MODULUS, digest
from lockstep.data.sources import skipping


class Bad(IndexSource):
    """Sample 5 can't be read; sample 8 can, but not together with others."""

    def __init__(self, samples: int = 12, error: Exception | None = None, differs: bool = True) -> None:
        super().__init__(samples)
        self.differs = differs
        self.error = error or KeyError("no such image")

    def fetch(self, indices: np.ndarray) -> Batch:
        if 5 in indices:
            raise self.error
        if 8 in indices and len(indices) > 1 and self.differs:
            raise ValueError("sizes differ")
        return super().fetch(indices)


def fetched(source: Any, *indices: int) -> tuple[list[int], list[int], int]:
    """Return the samples in the batch, those left out, and the batch's number of samples."""
    batch = source.fetch(np.array(indices))
    return batch.inputs[0].tolist(), [sample.index for sample in batch.left_out], batch.samples


@pytest.mark.parametrize(
    ("indices", "used", "left_out"),
    [
        pytest.param((4, 7), [4, 7], [], id="all are fine"),
        pytest.param((4, 5, 7), [4, 7], [5], id="unreadable"),
        pytest.param((3, 5, 1), [3, 1], [5], id="order stays"),
    ],
)
def test_what_is_left_out(indices: tuple[int, ...], used: list[int], left_out: list[int]) -> None:
    assert fetched(SkippingSource(Bad()), *indices) == (used, left_out, len(used))


def test_a_batch_without_usable_samples_has_no_weight() -> None:
    values, left_out, samples = fetched(SkippingSource(Bad()), 5)
    assert (values, left_out, samples) == ([0], [5], 0)
    values, left_out, samples = fetched(SkippingSource(Bad()), 5, 5, 5)
    assert (values, samples) == ([0, 0], 0), "batch norm can't be computed of one"


def test_a_sample_that_is_not_finite_stands_in_for_none() -> None:
    """Without weight it would still make the gradient of its update NaN."""
    items = [(torch.full((2,), float("nan") if index == 0 else float(index)), 0) for index in range(40)]
    source = skipping(adapt_dataset(items), BadSamples(), [(5, 6)])
    batch = source.fetch(np.array([5, 6]))
    assert batch.samples == 0
    assert all(tensor.isfinite().all() for tensor in batch.inputs if tensor.is_floating_point())


def test_reasons_have_the_exception_and_its_line() -> None:
    (left_out,) = SkippingSource(Bad()).fetch(np.array([5, 4, 2])).left_out
    assert left_out.reason.startswith("KeyError: 'no such image' (")
    assert "test_bad_samples.py:" in left_out.reason


def test_samples_that_can_be_read_but_not_together_are_named_and_not_left_out() -> None:
    loader = make_loader(SkippingSource(Bad()), global_size=12, micro_size=12, shuffle=False)
    with fails(RunFailed, "sample 8", "one batch", "ValueError: sizes differ"):
        next(loader.updates(Progress()))


def test_known_samples_are_not_read_again() -> None:
    source = Bad()
    skipping_source = SkippingSource(source)
    skipping_source.leave_out({4: "was bad", 5: "was bad"})
    source.error = AssertionError("was read again")
    batch = skipping_source.fetch(np.array([3, 4, 5]))
    assert [(sample.index, sample.reason) for sample in batch.left_out] == [(4, "was bad"), (5, "was bad")]


def test_an_error_that_does_not_come_again_leaves_nothing_out() -> None:
    source = Bad()
    real, calls = source.fetch, iter([OSError("stale file handle")])

    def once(indices: np.ndarray) -> Batch:
        for error in calls:
            raise error
        return real(indices)

    source.fetch = once  # type: ignore[method-assign]
    loader = make_loader(SkippingSource(source), global_size=2, micro_size=2, shuffle=False)
    batch = next(loader.updates(Progress()))
    assert (batch.micro_batches[0].inputs[0].tolist(), batch.left_out) == ([0, 1], ())


def test_a_stop_is_not_about_a_sample() -> None:
    with pytest.raises(Stopped):
        SkippingSource(Bad(error=Stopped("stopped by SIGTERM"))).fetch(np.array([4, 5]))


@pytest.mark.parametrize("indices", [(4, 5), (5,)])
def test_a_sample_that_alone_runs_out_of_memory_is_left_out(indices: tuple[int, ...]) -> None:
    batch = SkippingSource(Bad(error=MemoryError("Unable to allocate 9 TiB"))).fetch(np.array(indices))
    assert [(sample.index, "9 TiB" in sample.reason) for sample in batch.left_out] == [(5, True)]
    assert batch.samples == len(indices) - 1


@pytest.mark.parametrize("most", [0, 1], ids=["of each", "of two"])
def test_memory_that_runs_out_of_others_too_is_not_about_a_sample(most: int) -> None:
    class Full(IndexSource):
        def fetch(self, indices: np.ndarray) -> Batch:
            if len(indices) > most and self.is_full:
                raise MemoryError
            return super().fetch(indices)

    source = Full(12)
    source.is_full = False
    left = SkippingSource(source, known={5: "known"})
    left.fetch(np.array([5]))  # which reads a sample that is fine
    source.is_full = True
    with pytest.raises(MemoryError):
        left.fetch(np.array([4, 7]))


def test_nothing_can_be_read() -> None:
    class Gone(IndexSource):
        def fetch(self, indices: np.ndarray) -> Batch:
            raise OSError("the disk is gone")

    with fails(RunFailed, "none", "12 samples", "sample 0", "OSError: the disk"):
        SkippingSource(Gone(12)).fetch(np.array([3]))
    every = SkippingSource(Gone(12), known=dict.fromkeys(range(12), "a rollback"))
    with fails(RunFailed, "left out", "sample 0", "a rollback"):
        every.fetch(np.array([3]))


def test_draws_are_those_of_a_batch_without_the_sample() -> None:
    class BadDraws(DrawingSource):
        def fetch(self, indices: np.ndarray) -> Batch:
            torch.rand(3)
            if 5 in indices:
                raise KeyError(5)
            return super().fetch(indices)

    with keyed_generators(1):
        left_out = SkippingSource(BadDraws(12)).fetch(np.array([4, 5, 7])).inputs
    with keyed_generators(1):
        expected = BadDraws(12).fetch(np.array([4, 7])).inputs
    assert left_out["drawn"][2] == expected["drawn"][2]


class Slow:
    """20 items, each read in some seconds; item 18, which isn't read at the start, has no end, whatever is raised."""

    seconds = 0.0

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds)
        while index == 18:
            try:
                time.sleep(0.01)
            except Exception:
                continue
        return index


def test_an_endless_item_is_left_out_with_its_line_and_a_slow_batch_is_not() -> None:
    items = Slow()
    source = skipping(adapt_dataset(items), BadSamples(policy="skip", timeout=0.8))
    items.seconds = 0.3
    before = signal.getsignal(signal.SIGALRM)
    assert not source.fetch(np.array([1, 2, 3, 4])).left_out
    [left_out] = source.fetch(np.array([1, 18])).left_out
    assert left_out.index == 18
    assert gives(left_out.reason, "TimeoutError", "0.8 s", "data.bad_samples.timeout")
    assert "test_bad_samples.py:" in left_out.reason
    began = time.perf_counter()
    assert source.fetch(np.array([18])).left_out == (left_out,)
    assert time.perf_counter() - began < 0.8, "it was read again"
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)


@pytest.mark.parametrize("workers", [0, 1])
def test_positions_and_digests_of_the_loader(workers: int) -> None:
    whole = make_loader(IndexSource(12), global_size=6, micro_size=2)
    source = Bad(differs=False)
    loader = make_loader(SkippingSource(source), global_size=6, micro_size=2, workers=workers)
    expected, updates = whole.updates(Progress()), loader.updates(Progress())
    positions = {}
    for _ in range(4):
        all_of_it, update = next(expected), next(updates)
        assert (update.samples, update.cursor, update.step) == (all_of_it.samples, all_of_it.cursor, all_of_it.step)
        assert len(update.micro_batches) == len(all_of_it.micro_batches)
        indices = np.array([sample.index for sample in update.left_out], np.int64)
        assert (update.digest + digest(update.epoch, indices)) % MODULUS == all_of_it.digest
        positions |= {sample.position: sample.index for sample in update.left_out}
    loader.close()
    order = {
        epoch * 12 + place: int(index)
        for epoch in range(2)
        for place, index in enumerate(loader._order.indices(epoch, np.arange(12)))
    }
    assert positions == {position: index for position, index in order.items() if index == 5}


@pytest.mark.parametrize("workers", [0, 2])
def test_a_worker_that_does_not_know_brings_no_sample_back(workers: int) -> None:
    source = SkippingSource(IndexSource(12))
    loader = make_loader(source, global_size=6, micro_size=2, workers=workers)
    updates = loader.updates(Progress())
    assert not next(updates).left_out
    source.leave_out({3: "found in this process, long after its workers have begun"})
    seen: list[int] = []
    lacked: list[int] = []
    for _ in range(4):
        update = next(updates)
        seen += [index for batch in update.micro_batches if batch.samples for index in batch.inputs[0].tolist()]
        lacked += [sample.index for sample in update.left_out]
    loader.close()
    assert 3 not in seen
    assert lacked in ([3, 3], [3])  # once an epoch; it may have been in the first update


class CountsReads(IndexSource):
    """Counts how often each sample is read, in memory that data workers share."""

    def __init__(self, samples: int) -> None:
        super().__init__(samples)
        self.reads = torch.zeros(samples, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    def fetch(self, indices: np.ndarray) -> Batch:
        for index in indices.tolist():
            self.reads[index] += 1
        return super().fetch(indices)


def test_a_worker_does_not_read_what_all_ranks_leave_out_by_then() -> None:
    source = CountsReads(400)
    skipping_source = SkippingSource(source)
    loader = make_loader(skipping_source, workers=2, shuffle=False)
    updates = loader.updates(Progress())
    next(updates)
    skipping_source.leave_out({371: "another rank's"})
    left_out = [sample.index for _ in range(49) for sample in next(updates).left_out]
    loader.close()
    assert left_out == [371]
    assert (source.reads[370].item(), source.reads[371].item()) == (1, 0)
