"""Which blocks of a model go to which stage of a pipeline, and how long stages wait. Pure arithmetic.

blocks    b0  b1  b2  b3  b4  b5  head             costs: numbers of weights that a token meets
stages    [0         ][1         ][2         ]     the dearest stage as cheap as can be
ranks      0           1           0               interleaved: each rank has several, in turns
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from typing import Literal

Schedule = Literal["gpipe", "1f1b", "interleaved-1f1b", "zero-bubble", "zbv"]
INTERLEAVED: tuple[Schedule, ...] = ("interleaved-1f1b", "zero-bubble", "zbv")


def stages_of(schedule: Schedule, asked: int | Literal["auto"]) -> int:
    """Stages of each rank."""
    if asked == "auto":
        return 2 if schedule in INTERLEAVED else 1
    return asked


def balanced(costs: Sequence[float], stages: int, last: float = 0.0) -> list[int]:
    """Where stages begin: indices into `costs`, the first of them 0. No stage is empty, and the dearest costs as little
    as can be.

    Args:
        last: what the last stage does beside its blocks.
    """
    assert 1 <= stages <= len(costs), f"{stages} stages of {len(costs)} blocks"
    sums = [0.0, *itertools.accumulate(costs)]
    best = [[float("inf")] * (len(costs) + 1) for _ in range(stages + 1)]
    begins = [[0] * (len(costs) + 1) for _ in range(stages + 1)]
    best[0][0] = 0.0
    for stage in range(1, stages + 1):
        extra = last if stage == stages else 0.0
        for end in range(stage, len(costs) + 1):
            for begin in range(stage - 1, end):
                dearest = max(best[stage - 1][begin], sums[end] - sums[begin] + extra)
                if dearest < best[stage][end]:
                    best[stage][end], begins[stage][end] = dearest, begin
    found, end = [], len(costs)
    for stage in range(stages, 0, -1):
        end = begins[stage][end]
        found.append(end)
    return found[::-1]


def owner(stage: int, ranks: int, schedule: Schedule) -> int:
    """The rank of the pipeline that has it: in turns, or, under zbv, down and up again."""
    if schedule == "zbv":
        return stage if stage < ranks else 2 * ranks - 1 - stage
    return stage % ranks


def stage_of_block(block: int, begins: Sequence[int]) -> int:
    return bisect.bisect_right(begins, block) - 1


def bubble(schedule: Schedule, ranks: int, stages_per_rank: int, micro_batches: int) -> float:
    """Share of a rank's time that it waits, if all stages cost the same and backward costs twice as much as forward.

    p ranks, m micro-batches, v stages a rank. gpipe and 1f1b: (p - 1) / (m + p - 1) (Narayanan et al. 2021,
    arXiv:2104.04473, section 2.2.1); interleaved: (p - 1) / (v m + p - 1) (ibid., 2.2.2). zero-bubble: the gradients of
    weights, a third of the work, fill in: (p - 1) / (3 v m + p - 1) at best; zbv has none with m >= 2 p (Qi et al.
    2024, arXiv:2401.10241, table 2).
    """
    idle, work = float(ranks - 1), float(stages_per_rank * micro_batches)
    if schedule == "zbv" and micro_batches >= 2 * ranks:
        return 0.0
    if schedule in ("zero-bubble", "zbv"):
        work *= 3
    return idle / (work + idle)
