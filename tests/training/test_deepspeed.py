"""ZeRO by DeepSpeed: every stage is the single process."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from kit.runs import Trajectory, differences, recorded, recorded_all
from training.test_same_run import config

GLOBAL_SIZES = (16, 13)
ACCUMULATIONS = (1, 2)


def zero(stage: int, **options: Any) -> dict[str, Any]:
    return {"strategy": "deepspeed", "deepspeed": {"zero_stage": stage, **options}}


@cache
def oracle(global_size: int) -> Trajectory:
    return recorded(config(global_size))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_stage_is_the_single_process(ranks: int) -> None:
    configs, oracles = [], []
    for stage in (0, 1, 2, 3):
        for global_size in GLOBAL_SIZES:
            for accumulation in ACCUMULATIONS:
                micro_size = -(-global_size // (ranks * accumulation))
                configs.append(config(global_size, micro_size, parallel=zero(stage)))
                oracles.append(oracle(global_size))
    for run, expected, asked in zip(recorded_all(configs, ranks), oracles, configs, strict=True):
        assert differences(run, expected) == [], asked
