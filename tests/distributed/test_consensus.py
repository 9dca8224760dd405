"""The vote: every rank gets the same sums and requests of all ranks."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from kit import small
from kit.worlds import in_world

from lockstep.core.records import Request
from lockstep.distributed import consensus
from lockstep.distributed import consensus as votes
from lockstep.distributed.collectives import LocalGroup, RankGroup

CPU = torch.device("cpu")


def _votes(kind: str, norms: list[list[float]]) -> list[tuple[list[float], bool]]:
    """Return the numbers, the requests and whether the gradients of the update before agreed, of each vote in a row."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with small.in_group():
        axis = RankGroup(torch.distributed.group.WORLD) if ranks > 1 else LocalGroup()
        consensus = votes.HostConsensus(axis) if kind == "host" else votes.DeviceConsensus(axis, CPU)
        return [_vote(consensus, rank, ranks, norm[rank]) for norm in norms]


def _vote(consensus: votes.Consensus, rank: int, ranks: int, norm: float) -> Any:
    consensus.open(
        torch.tensor(1.5 + rank), 10 + rank, 20 + rank, (2.0, 3.0 * rank, 0.0), [Request.EVALUATE] if rank == 1 else []
    )
    result = consensus.close(lambda: torch.tensor(norm))
    slots = torch.as_tensor(result.slots, dtype=torch.float64).tolist()
    numbers = (result.loss_sum, result.squared_norm, result.next_count, result.next_tokens)
    return [float(number) for number in numbers], votes.requests_in(slots), votes.gradients_agree(slots, ranks)


@pytest.mark.parametrize("kind", ["host", "device"])
def test_sums_and_requests_are_those_of_all_ranks(kind: str) -> None:
    results = in_world(2, _votes, kind, [[3.0, 3.0]])
    assert results == [[([4.0, 3.0, 21.0, 41.0], frozenset({Request.EVALUATE}), True)]] * 2


@pytest.mark.parametrize("kind", ["host", "device"])
def test_a_single_rank_gets_its_own_numbers(kind: str) -> None:
    assert in_world(1, _votes, kind, [[3.0]]) == [[([1.5, 3.0, 10.0, 20.0], frozenset(), True)]]


NAN, INFINITE = float("nan"), float("inf")
SAME = [[3.0] * 3, [NAN] * 3, [INFINITE] * 3, [0.0] * 3, [1e-38] * 3, [3e38] * 3, [3.0, 3.0, 3.00001]]
DIFFERENT = [[3.0, 3.0, 3.01], [3.0, 3.0, NAN], [3.0, INFINITE, 3.0], [0.0, 0.0, 1e-30], [1.0, 1.0, -1.0 + 1e-3]]


@pytest.mark.parametrize("kind", ["host", "device"])
def test_gradients_that_differ_between_ranks_are_noticed_in_the_next_vote(kind: str) -> None:
    last = [[1.0] * 3]
    for norms, expected in ((SAME, True), (DIFFERENT, False)):
        for results in in_world(3, _votes, kind, norms + last):
            assert [agrees for _, _, agrees in results] == [True] + [expected] * len(norms)


NUMBERS = (1e-300, 3e-38, 0.7, 1.0, 12345.678, 3e38, 1e300)


@pytest.mark.parametrize("ranks", [2, 3, 64, 1024, 100_000])
@pytest.mark.parametrize("on_device", [False, True])
def test_one_rank_among_any_number_is_noticed(ranks: int, on_device: bool) -> None:
    """The sum over ranks is exact, so an outlier weighs the same among two ranks as among 100,000."""

    def slots(number: float) -> torch.Tensor:
        if on_device:
            return consensus.slots_on_device(torch.tensor(number, dtype=torch.float64))
        return torch.tensor(consensus.slots_of(number), dtype=torch.float64)

    def agrees(most: float, one: float) -> bool:
        sums = ((ranks - 1) * slots(most) + slots(one)).tolist()
        return consensus.gradients_agree([*[0.0] * consensus.NORM_BEFORE, *sums], ranks)

    for number in NUMBERS:
        for near in (0.0, 1e-12, 1e-5, -1e-5, 1.9e-5):
            assert agrees(number, number * (1 + near))
        for far in (4.1e-5, -4.1e-5, 1e-3, 1e3):
            assert not agrees(number, number * (1 + far))
        for other in (NAN, INFINITE, 0.0, -number):
            assert not agrees(number, other)
            assert not agrees(other, number)
    for same in (NAN, INFINITE, 0.0):
        assert agrees(same, same)


@pytest.mark.parametrize("kind", ["host", "device"])
def test_a_sum_of_losses_in_the_strategy_s_own_order_replaces_the_vote_s(kind: str) -> None:
    axis, ordered = LocalGroup(), partial(torch.tensor, 7.25)
    vote = votes.HostConsensus(axis, ordered) if kind == "host" else votes.DeviceConsensus(axis, CPU, ordered)
    vote.open(torch.tensor(1.5), 10, 20, (0.0,) * 3, [])
    result = vote.close(lambda: torch.tensor(3.0))
    assert float(result.loss_sum) == float(result.slots[votes.LOSS_SUM]) == 7.25


class _LoggedSums(LocalGroup):
    """A group of two ranks that logs when a sum is waited for."""

    size = 2

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def start_sum(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        self.log.append("started")
        return lambda: self.log.append("waited for") or tensor  # type: ignore[func-returns-value]


def test_on_a_cpu_no_collective_follows_one_that_was_not_waited_for() -> None:
    log: list[str] = []
    vote = votes.HostConsensus(_LoggedSums(log))
    vote.open(torch.tensor(1.5), 10, 20, (0.0,) * 3, [])
    vote.close(lambda: log.append("norm") or torch.tensor(3.0))  # type: ignore[func-returns-value]
    assert log == ["started", "waited for", "norm"]
