"""The split of a global batch: each of its samples is in exactly one micro-batch."""

from hypothesis import given
from hypothesis import strategies as st

from lockstep.plan.batch import micro_ranges, nearest_even_sizes, plan_batch

SAMPLES = st.integers(0, 300)
MICRO = st.integers(1, 40)
RANKS = st.integers(1, 24)


@given(SAMPLES, MICRO, RANKS)
def test_ranges_of_all_ranks_cover_the_samples_in_order_once(samples, micro, ranks):
    ranges = [part for rank in range(ranks) for part in micro_ranges(samples, micro, rank, ranks)]
    assert [index for start, stop in ranges for index in range(start, stop)] == list(range(samples))


@given(SAMPLES, MICRO, RANKS)
def test_every_rank_runs_the_same_number_of_micro_batches_none_too_large(samples, micro, ranks):
    by_rank = [list(micro_ranges(samples, micro, rank, ranks)) for rank in range(ranks)]
    assert len({len(ranges) for ranges in by_rank}) == 1
    for ranges in by_rank:
        sizes = [stop - start for start, stop in ranges]
        assert max(sizes) <= micro
        assert max(sizes) - min(sizes) <= 1


@given(st.integers(1, 300), MICRO, RANKS)
def test_a_full_update_is_split_as_planned(size, micro, ranks):
    batch = plan_batch(size, micro, ranks)
    assert len(list(micro_ranges(size, batch.micro_size, 0, ranks))) == batch.accumulation
    assert batch.micro_size * batch.accumulation * ranks >= size
    assert 0 <= batch.waste < 1
    assert batch.waste == 0 or not batch.even


@given(st.integers(1, 300), MICRO, RANKS)
def test_nearest_even_sizes_are_even_and_enclose_the_size(size, micro, ranks):
    below, above = nearest_even_sizes(size, micro, ranks)
    assert plan_batch(below, micro, ranks).even
    assert plan_batch(above, micro, ranks).even
    assert above > size
    assert below <= size or below == micro * ranks


def test_auto_takes_the_whole_share_at_once():
    batch = plan_batch(10, "auto", 3)
    assert (batch.micro_size, batch.accumulation, batch.even) == (4, 1, False)
    assert batch.product(3) == "10 < 4 x 1 x 3 (micro-batch x accumulation x ranks)"
    assert plan_batch(12, 2, 3).product(3) == "12 = 2 x 2 x 3 (micro-batch x accumulation x ranks)"


def test_waste_is_the_share_of_time_without_samples():
    assert plan_batch(10, "auto", 3).waste == 1 - 10 / 12
    assert plan_batch(10, 4, 1).waste == 0  # 4 + 3 + 3: micro-batches aren't full, but no rank waits


@given(st.integers(1, 300), st.integers(1, 300), MICRO, RANKS)
def test_fixed_micro_batches_are_the_same_on_any_ranks(global_size, samples, micro, ranks):
    batch = plan_batch(global_size, micro, ranks, fixed=True)
    samples = min(samples, global_size)
    by_rank = [batch.ranges(samples, rank) for rank in range(ranks)]
    real = [part for ranges in by_rank for part in ranges if part[1] > part[0]]
    assert real == plan_batch(global_size, micro, 1, fixed=True).ranges(samples, 0)
    assert [index for start, stop in real for index in range(start, stop)] == list(range(samples))
    assert len({len(ranges) for ranges in by_rank}) == 1
    for rank, ranges in enumerate(by_rank):
        share = batch.share(samples, rank)
        own = [part for part in ranges if part[1] > part[0]]
        assert own == ranges[: len(own)] == real[share.first : share.stop]
        assert share.terms == len(real)
        assert all(stop - start <= micro for start, stop in ranges)
    assert len(plan_batch(global_size, micro, ranks, fixed=True).ranges(global_size, 0)) == batch.accumulation
    assert 0 <= batch.waste < 1


def test_fixed_micro_batches_of_ten_samples_on_three_ranks():
    batch = plan_batch(10, 2, 3, fixed=True)
    assert [batch.ranges(10, rank) for rank in range(3)] == [[(0, 2), (2, 4)], [(4, 6), (6, 8)], [(8, 10), (10, 10)]]
    assert batch.waste == 1 - 5 / 6
