"""Updates contain the same samples for any ranks, micro-batches, workers and restarts."""

import re
from collections.abc import Callable
from contextlib import closing
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from index_sources import BrokenSource, DrawingSource, IndexSource, make_loader
from kit.failures import fails

from lockstep.config.schema import Loader
from lockstep.core import heartbeat
from lockstep.core.errors import ConfigError, RunFailed, WorkerDied
from lockstep.core.failure_kinds import FailureKind
from lockstep.core.heartbeat import Reading
from lockstep.core.progress import Progress
from lockstep.core.records import Batch, GlobalBatch
from lockstep.data.loader import evaluation_batches
from lockstep.data.noise import drop_second_normal
from lockstep.data.order import SampleOrder

CPU = torch.device("cpu")


def samples_of(update: GlobalBatch) -> list[int]:
    """Return the samples of this rank's share, in order, without padding."""
    return [index for batch in update.micro_batches if batch.samples for index in batch.inputs[0].tolist()]


def taken(loader, number: int, progress: Progress | None = None) -> list[GlobalBatch]:
    with closing(loader):
        return list(islice(loader.updates(progress or Progress()), number))


def test_samples_are_noted_while_they_are_read():
    """Of the training data and of evaluation sets."""
    seen = []

    class Noted(IndexSource):
        def fetch(self, indices):
            seen.append((heartbeat.own().reading(), indices.tolist()))
            return super().fetch(indices)

    taken(make_loader(Noted(64), global_size=64, micro_size=16), 1)
    heartbeat.own().begin_evaluation("held-out")
    list(evaluation_batches(Noted(64), 16, 0, 1, Loader(), CPU))
    assert [reading for reading, _ in seen[:4]] == [Reading((*samples,)) for _, samples in seen[:4]]
    assert [reading for reading, _ in seen[4:]] == [Reading((*samples,), "held-out") for _, samples in seen[4:]]
    assert len(seen) == 8
    assert heartbeat.own().reading() is None


# --- samples of updates -------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    samples=st.integers(1, 60),
    global_size=st.integers(1, 70),
    micro_size=st.integers(1, 20),
    ranks=st.sampled_from([1, 2, 3, 4, 8]),
    updates=st.integers(0, 20),
)
def test_an_update_has_the_same_samples_for_any_ranks_and_micro_size(samples, global_size, micro_size, ranks, updates):
    source = IndexSource(samples)
    alone = taken(make_loader(source, global_size), updates + 3)
    start = Progress(updates, alone[updates - 1].cursor if updates else 0, 0)
    shares = [
        taken(make_loader(source, global_size, micro_size=micro_size, rank=rank, ranks=ranks), 3, start)
        for rank in range(ranks)
    ]
    for number in range(3):
        expected = alone[updates + number]
        parts = [share[number] for share in shares]
        assert [index for part in parts for index in samples_of(part)] == samples_of(expected)
        assert sum(part.count for part in parts) == expected.count == 3 * expected.samples
        assert sum(part.tokens for part in parts) == expected.tokens
        for part in parts:
            for name in ("samples", "cursor", "epoch", "step"):
                assert getattr(part, name) == getattr(expected, name)
            assert len(part.micro_batches) == len(parts[0].micro_batches)
            assert all(batch.samples <= micro_size for batch in part.micro_batches)


@given(samples=st.integers(1, 100), global_size=st.integers(1, 40), drop_last=st.booleans())
def test_an_epoch_is_the_keyed_order_cut_into_global_batches(samples, global_size, drop_last):
    if drop_last and samples < global_size:
        return
    loader = make_loader(IndexSource(samples), global_size, drop_last=drop_last)
    per_epoch = -(-loader.epoch_samples // global_size)
    updates = taken(loader, 2 * per_epoch)
    for epoch in range(2):
        of_epoch = updates[epoch * per_epoch : (epoch + 1) * per_epoch]
        expected = SampleOrder(samples, 42).indices(epoch, np.arange(loader.epoch_samples)).tolist()
        assert [index for update in of_epoch for index in samples_of(update)] == expected
        assert {update.epoch for update in of_epoch} == {epoch}
        assert all(update.samples == global_size for update in of_epoch[:-1])
    assert [update.cursor for update in updates] == np.cumsum([update.samples for update in updates]).tolist()
    assert [update.step for update in updates] == list(range(len(updates)))


def test_a_run_resumes_inside_an_epoch():
    source = IndexSource(50)
    whole = taken(make_loader(source), 20)
    for done in range(1, 19):
        rest = taken(make_loader(source), 20 - done, Progress(done, whole[done - 1].cursor, 0))
        assert [samples_of(update) for update in rest] == [samples_of(update) for update in whole[done:]]


def test_a_cursor_between_updates_resumes_with_the_next_sample():
    order = SampleOrder(50, 42).indices(0, np.arange(50)).tolist()
    (update,) = taken(make_loader(IndexSource(50), 10), 1, Progress(3, 7, 0))
    assert samples_of(update) == order[7:17]


def test_global_batches_and_datasets_larger_than_a_block():
    source = IndexSource(20_000)
    order = SampleOrder(20_000, 42).indices(0, np.arange(20_000)).tolist()
    assert [index for update in taken(make_loader(source, 9000), 3) for index in samples_of(update)] == order
    assert [index for update in taken(make_loader(source, 16), 1250) for index in samples_of(update)] == order


def test_without_shuffling_samples_have_the_order_of_the_source():
    updates = taken(make_loader(IndexSource(10), 4, shuffle=False), 4)
    assert [samples_of(update) for update in updates] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3]]


def test_ranks_without_samples_get_padding_batches_without_weight():
    shares = [taken(make_loader(IndexSource(30), 3, rank=rank, ranks=8), 1)[0] for rank in range(8)]
    real = [share for share in shares if share.tokens]
    padding = [share for share in shares if not share.tokens]
    assert len(real) == 3
    for share in padding:
        assert share.count == 0
        assert share.samples == 3
        assert share.micro_batches[0].samples == share.micro_batches[0].tokens == 0
        assert share.micro_batches[0].inputs[0].tolist() == [samples_of(shares[0])[0]]


def test_dropping_all_samples_is_refused_with_a_global_size_that_fits():
    with fails(ConfigError, "batch.global_size to 5", "drop_last", "false"):
        make_loader(IndexSource(5), 8, drop_last=True)
    with pytest.raises(ConfigError, match="dataset is empty"):
        make_loader(IndexSource(0))


# --- workers ------------------------------------------------------------------------------------------------------


def tensors(update: GlobalBatch) -> list[torch.Tensor]:
    return [tensor for batch in update.micro_batches for tensor in batch.inputs.values()]


@pytest.mark.parametrize("persistent", [True, False])
def test_batches_of_workers_are_bitwise_those_of_the_rank(persistent):
    options = {"micro_size": 3, "rank": 1, "ranks": 2}
    expected = taken(make_loader(DrawingSource(20), **options), 6)
    loader = make_loader(DrawingSource(20), workers=2, persistent_workers=persistent, **options)
    from_workers = taken(loader, 6)
    loader.close()
    for update, other in zip(expected, from_workers, strict=True):
        assert (update.cursor, update.epoch, update.step) == (other.cursor, other.epoch, other.step)
        assert all(torch.equal(a, b) for a, b in zip(tensors(update), tensors(other), strict=True))


def test_the_same_workers_serve_several_epochs():
    loader = make_loader(PidSource(8), workers=1)
    pids = {update.micro_batches[0].targets for update in taken(loader, 6)}
    loader.close()
    assert len(pids) == 1


class PidSource(IndexSource):
    def fetch(self, indices):
        import os

        return Batch((), os.getpid(), len(indices), 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_sample_that_cannot_be_read_is_named(workers):
    loader = make_loader(BrokenSource(20), workers=workers)
    with fails(RunFailed, "sample 5", "KeyError: 'no such image'", kind=FailureKind.SAMPLE) as failed:
        taken(loader, 10)
    assert re.search(r"index_sources.py:\d+", str(failed.value))
    loader.close()


def test_samples_that_can_not_be_collated_are_named():
    class Ragged(IndexSource):
        def fetch(self, indices):
            if len(indices) > 1:
                raise ValueError("stack expects equal sizes")
            return super().fetch(indices)

    with fails(RunFailed, "samples 0, 1, 2", "ValueError", kind=FailureKind.SAMPLE):
        taken(make_loader(Ragged(3), shuffle=False), 1)


# torch raises in a signal handler; an error in a callback of the garbage collector is lost, and torch raises again
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_worker_that_dies_is_reported_with_its_samples():
    loader = make_loader(DyingSource(100), workers=1, shuffle=False)
    with fails(WorkerDied, "samples 8, 9, 10"):
        taken(loader, 10)


class DyingSource(IndexSource):
    def fetch(self, indices):
        import os
        import signal

        if 9 in indices:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().fetch(indices)


# --- draws --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "passed"), [(IndexSource, lambda: None), (DrawingSource, drop_second_normal)])
def test_fetching_does_not_advance_the_process_generators(kind: type[IndexSource], passed: Callable[[], None]) -> None:
    import random

    def draw() -> tuple[float, float, float, float]:
        return random.random(), np.random.random(), np.random.standard_normal(), float(torch.rand(()))

    def seed() -> None:
        random.seed(1)
        np.random.seed(2)
        np.random.standard_normal()  # keeps the second of a pair in its state
        torch.manual_seed(3)

    seed()
    passed()
    expected = draw()
    for workers in (0, 1):
        seed()
        loader = make_loader(kind(20), workers=workers)
        taken(loader, 3)
        assert draw() == expected
        loader.close()


def test_draws_differ_between_updates_ranks_and_micro_batches():
    seen = []
    for rank in range(2):
        for update in taken(make_loader(DrawingSource(20), micro_size=2, rank=rank, ranks=2), 3):
            seen += [tuple(batch.inputs["drawn"].tolist()) for batch in update.micro_batches]
    assert len(set(seen)) == len(seen)


def test_noise_of_a_sample_does_not_depend_on_ranks_and_micro_batches():
    def noise_of(update: GlobalBatch) -> dict[int, list[float]]:
        return {
            int(index): row.tolist()
            for batch in update.micro_batches
            for index, row in zip(batch.inputs["indices"], batch.inputs["noise"], strict=True)
        }

    whole = [noise_of(update) for update in taken(make_loader(DrawingSource(8)), 2)]
    halves = [taken(make_loader(DrawingSource(8), micro_size=2, rank=rank, ranks=2), 2) for rank in range(2)]
    for epoch in range(2):
        assert noise_of(halves[0][epoch]) | noise_of(halves[1][epoch]) == whole[epoch]
    assert all(whole[0][index] != whole[1][index] for index in range(8))


# --- evaluation ---------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 9), st.sampled_from([1, 2, 3, 4, 8]))
def test_evaluation_uses_every_sample_once(samples, micro_size, ranks):
    shares = [
        list(evaluation_batches(IndexSource(samples), micro_size, rank, ranks, Loader(), CPU)) for rank in range(ranks)
    ]
    assert len({len(share) for share in shares}) == 1
    seen = [index for share in shares for batch in share if batch.samples for index in batch.inputs[0].tolist()]
    assert seen == list(range(samples))
    assert all(batch.samples == 0 and batch.tokens == 0 for share in shares for batch in share if batch.samples == 0)


def test_evaluation_draws_the_same_each_time_with_and_without_workers():
    def evaluate(workers: int) -> list[torch.Tensor]:
        batches = evaluation_batches(DrawingSource(11), 4, 0, 2, Loader(workers=workers), CPU)
        return [tensor for batch in batches for tensor in batch.inputs.values()]

    for workers in (0, 2):
        assert all(torch.equal(a, b) for a, b in zip(evaluate(0), evaluate(workers), strict=True))


def test_pinning_without_a_gpu_is_refused():
    with pytest.raises(ConfigError, match="pin_memory"):
        evaluation_batches(IndexSource(4), 2, 0, 1, Loader(pin_memory=True), CPU)


@pytest.mark.parametrize("workers", [0, 1])
def test_fixed_micro_batches_draw_the_same_on_any_number_of_ranks(workers):
    """The last update of the epoch is smaller, so that the ranks' shares begin at other samples."""

    def drawn(ranks: int) -> list[list[tuple[list[int], list[float]]]]:
        shares = [
            taken(
                make_loader(DrawingSource(21), 8, micro_size=2, rank=rank, ranks=ranks, fixed=True, workers=workers), 4
            )
            for rank in range(ranks)
        ]
        return [
            [
                (batch.inputs["indices"].tolist(), batch.inputs["drawn"].tolist())
                for share in shares
                for batch in share[number].micro_batches
                if batch.samples
            ]
            for number in range(4)
        ]

    alone = drawn(1)
    assert [len(update) for update in alone] == [4, 4, 3, 4]
    for ranks in (2, 3, 4):
        assert drawn(ranks) == alone
