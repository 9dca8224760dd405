"""Assigns the blocks of a model to the stages of a pipeline, and computes how long stages wait. Pure arithmetic.

blocks    b0  b1  b2  b3  b4  b5  head             costs: numbers of weights that a token passes through
stages    [0         ][1         ][2         ]     the slowest stage is as fast as possible
ranks      0           1           0               interleaved: each rank has several, round-robin
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Literal

from lockstep.strategies.partitions import PipelineSchedule

Schedule = PipelineSchedule
INTERLEAVED: tuple[Schedule, ...] = ("interleaved-1f1b", "zero-bubble", "zbv")


def stages_of(schedule: Schedule, stages_per_rank: int | Literal["auto"]) -> int:
    """Return the number of stages of each rank."""
    if stages_per_rank == "auto":
        return 2 if schedule in INTERLEAVED else 1
    return stages_per_rank


def balanced(costs: Sequence[float], stages: int, last: float = 0.0) -> list[int]:
    """Return the index of each stage's first block, so that the slowest stage is as fast as possible.

    Args:
        last: Cost of the last stage in addition to its blocks.
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
                slowest = max(best[stage - 1][begin], sums[end] - sums[begin] + extra)
                if slowest < best[stage][end]:
                    best[stage][end], begins[stage][end] = slowest, begin
    first_blocks, end = [], len(costs)
    for stage in range(stages, 0, -1):
        end = begins[stage][end]
        first_blocks.append(end)
    return first_blocks[::-1]


def owner(stage: int, ranks: int, schedule: Schedule) -> int:
    """Return the pipeline rank that has the stage: round-robin, or, under zbv, down and up again."""
    if schedule == "zbv":
        return stage if stage < ranks else 2 * ranks - 1 - stage
    return stage % ranks


def bubble(schedule: Schedule, ranks: int, stages_per_rank: int, micro_batches: int) -> float:
    """Return the fraction of its time that a rank waits, if all stages cost the same and a backward two forwards.

    p ranks, m micro-batches, v stages a rank. gpipe and 1f1b: (p - 1) / (m + p - 1) (Narayanan et al. 2021,
    arXiv:2104.04473, section 2.2.1); interleaved: (p - 1) / (v m + p - 1) (ibid., 2.2.2). zero-bubble: (p - 1) /
    (3 v m + p - 1) at best; zbv has none with m >= 2 p (Qi et al. 2024, arXiv:2401.10241, table 2).
    """
    idle, work = float(ranks - 1), float(stages_per_rank * micro_batches)
    if schedule == "zbv" and micro_batches >= 2 * ranks:
        return 0.0
    if schedule in ("zero-bubble", "zbv"):
        work *= 3
    return idle / (work + idle)
