"""Metrics over ranks: weighted, with ranks that have nothing, and with mistakes on one rank."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.worlds import in_world

import lockstep
from lockstep.distributed.user_collectives import reduce


def several(calls: list[list[dict[str, Any]]]) -> list[Any]:
    dist.init_process_group("gloo")
    answers: list[Any] = []
    for of_ranks in calls:
        try:
            answers.append(reduce(**of_ranks[dist.get_rank()]))
        except ValueError as error:
            answers.append(str(error))
    answers.append(
        (lockstep.loops.broadcast(f"from {dist.get_rank()}", source=1), lockstep.loops.gather(dist.get_rank()))
    )
    histogram = lockstep.loops.merged_histogram(torch.full((3,), float(dist.get_rank() + 1)))
    answers.append((histogram.count, histogram.low, histogram.high, histogram.total))
    dist.destroy_process_group()
    return answers


def test_two_ranks_of_a_plain_process_group() -> None:
    loss, other = {"loss": 2.0}, {"loss": torch.tensor(5.0)}
    calls = [
        [{"metrics": loss, "weight": 10}, {"metrics": other, "weight": torch.tensor(20)}],
        *(
            [{"metrics": loss, "weight": 10, "how": how}, {"metrics": other, "how": how}]
            for how in ("sum", "min", "max")
        ),
        [{"metrics": loss}, {"metrics": {"loss": math.nan}, "weight": 0}],
        [{"metrics": {**loss, "own": 7.0}}, {"metrics": {}}],
        [{"metrics": loss}, {"metrics": {"loss": torch.zeros(3)}}],
        [{"metrics": loss, "weight": -1}, {"metrics": loss}],
    ]
    first, second = in_world(2, several, calls)
    assert first == second
    assert first[:6] == [
        {"loss": 4.0},
        {"loss": 7.0},
        {"loss": 2.0},
        {"loss": 5.0},
        {"loss": 2.0},
        {"loss": 2.0, "own": 7.0},
    ]
    assert "on rank 1: loss is not one number" in first[6]
    assert "on rank 0: the weight is -1" in first[7]
    assert first[8] == ("from 1", [0, 1])
    assert first[9] == (6, 1.0, 2.0, 9.0)


def test_one_process_is_one_rank() -> None:
    assert reduce({"loss": 3}, weight=0)["loss"] != reduce({"loss": 3}, weight=0)["loss"]  # NaN: nothing counts
    assert reduce({"loss": 3}) == {"loss": 3.0}
    assert math.isnan(reduce({"loss": math.nan}, how="max")["loss"])


def test_mistakes_name_what_is_right() -> None:
    with pytest.raises(ValueError, match="has no 'median'; it has mean, sum, min, max"):
        reduce({"loss": 1.0}, how="median")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no rank 3; the last one is 0"):
        lockstep.loops.broadcast(1, source=3)
