"""A vote: what each rank says before its backward and after it, every rank hears as one."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from kit import small
from kit.worlds import in_world

from lockstep.core.records import Request
from lockstep.distributed import consensus as votes
from lockstep.distributed.collectives import LocalGroup, RankGroup

CPU = torch.device("cpu")


def _votes(kind: str, norms: list[list[float]]) -> list[tuple[list[float], bool]]:
    """Of each vote in a row: loss sum, squared norm, counts; requests; whether the update before had one gradient."""
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    with small.in_group():
        axis = RankGroup(torch.distributed.group.WORLD) if ranks > 1 else LocalGroup()
        consensus = votes.HostConsensus(axis) if kind == "host" else votes.DeviceConsensus(axis, CPU)
        return [_vote(consensus, rank, ranks, norm[rank]) for norm in norms]


def _vote(consensus: votes.Consensus, rank: int, ranks: int, norm: float) -> Any:
    consensus.open(
        torch.tensor(1.5 + rank), 10 + rank, 20 + rank, (2.0, 3.0 * rank, 0.0), [Request.EVALUATE] if rank == 1 else []
    )
    outcome = consensus.close(torch.tensor(norm))
    slots = torch.as_tensor(outcome.slots, dtype=torch.float64).tolist()
    said = (outcome.loss_sum, outcome.squared_norm, outcome.next_count, outcome.next_tokens)
    return [float(value) for value in said], votes.requests_in(slots), votes.gradients_agree(slots, ranks)


@pytest.mark.parametrize("kind", ["host", "device"])
def test_sums_and_requests_are_those_of_all_ranks(kind: str) -> None:
    results = in_world(2, _votes, kind, [[3.0, 3.0]])
    assert results == [[([4.0, 3.0, 21.0, 41.0], frozenset({Request.EVALUATE}), True)]] * 2


@pytest.mark.parametrize("kind", ["host", "device"])
def test_one_rank_is_nobody_to_ask(kind: str) -> None:
    assert in_world(1, _votes, kind, [[3.0]]) == [[([1.5, 3.0, 10.0, 20.0], frozenset(), True)]]


NAN, INFINITE = float("nan"), float("inf")
SAME = [[3.0] * 3, [NAN] * 3, [INFINITE] * 3, [0.0] * 3, [1e-38] * 3, [3e38] * 3, [3.0, 3.0, 3.00001]]
DIFFERENT = [[3.0, 3.0, 3.01], [3.0, 3.0, NAN], [3.0, INFINITE, 3.0], [0.0, 0.0, 1e-30], [1.0, 1.0, -1.0 + 1e-3]]


@pytest.mark.parametrize("kind", ["host", "device"])
def test_a_gradient_that_was_not_one_is_noticed_in_the_next_vote(kind: str) -> None:
    ends = [[1.0] * 3]
    for norms, expected in ((SAME, True), (DIFFERENT, False)):
        for found in in_world(3, _votes, kind, norms + ends):
            assert [one for _, _, one in found] == [True] + [expected] * len(norms)
