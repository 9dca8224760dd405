"""Pipeline stages: none is empty, the slowest is as fast as possible; and how long they wait."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.plan.stages import INTERLEAVED, balanced, bubble, owner, stages_of

COSTS = st.lists(st.integers(1, 20), min_size=1, max_size=7)


def slowest(costs: list[int], begins: tuple[int, ...], last: float) -> float:
    ends = [*begins[1:], len(costs)]
    sums = [float(sum(costs[a:b])) for a, b in zip(begins, ends, strict=True)]
    sums[-1] += last
    return max(sums)


@given(COSTS, st.integers(1, 4), st.integers(0, 30))
def test_no_other_partition_has_a_faster_slowest_stage(costs: list[int], stages: int, last: int) -> None:
    stages = min(stages, len(costs))
    begins = balanced(costs, stages, last)
    assert len(begins) == stages
    assert begins[0] == 0
    assert begins == sorted(set(begins))
    others = [(0, *rest) for rest in itertools.combinations(range(1, len(costs)), stages - 1)]
    assert slowest(costs, tuple(begins), last) == min(slowest(costs, other, last) for other in others)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved-1f1b", "zero-bubble", "zbv"])
def test_every_rank_has_the_same_number_of_stages(schedule: str) -> None:
    for ranks in (1, 2, 4):
        per_rank = stages_of(schedule, "auto")  # type: ignore[arg-type]
        owners = [owner(stage, ranks, schedule) for stage in range(ranks * per_rank)]  # type: ignore[arg-type]
        assert sorted(owners) == sorted([*range(ranks)] * per_rank)
        if schedule == "zbv":
            assert owners == owners[::-1], "down and up again"


def test_the_bubble_is_that_of_the_papers() -> None:
    assert bubble("1f1b", 4, 1, 12) == pytest.approx(3 / 15)
    assert bubble("gpipe", 2, 1, 1) == pytest.approx(1 / 2)
    assert bubble("interleaved-1f1b", 4, 2, 12) == pytest.approx(3 / 27)
    assert bubble("zero-bubble", 4, 2, 12) == pytest.approx(3 / 75)
    assert bubble("zbv", 4, 2, 8) == 0


@given(st.sampled_from(["gpipe", "1f1b", *INTERLEAVED]), st.integers(1, 16), st.integers(1, 64))
def test_stages_never_wait_longer_with_more_micro_batches(schedule: str, ranks: int, micro_batches: int) -> None:
    per_rank = stages_of(schedule, "auto")  # type: ignore[arg-type]
    waits = [bubble(schedule, ranks, per_rank, count) for count in (micro_batches, micro_batches + 1)]  # type: ignore[arg-type]
    assert 0 <= waits[1] <= waits[0] < 1
