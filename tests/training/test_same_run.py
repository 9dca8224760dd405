"""One oracle, many worlds: whatever the ranks and the accumulation, the run is the single process's."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from kit.faults import FAULTS
from kit.layouts import DRILLED, HYBRID, VARIANTS, asking_for, is_partitioned
from kit.runs import Trajectory, differences, recorded, recorded_all, unnoticed

ACCUMULATIONS = (1, 2, 4)
GLOBAL_SIZES = (16, 13)  # one divides by the ranks, the other by nothing


def config(global_size: int, micro_size: int | str = "auto", **sections: Any) -> dict[str, Any]:
    """A small transformer on ragged text, clipped, in fp32; 40 samples, so that the fourth update ends an epoch."""
    ragged = {"kind": "custom", "target": "kit.ragged:Ragged", "collate": "kit.ragged:collate_in_sevens"}
    return {
        "model": {"kind": "transformer", "layers": 2, "width": 32, "heads": 4, "kv_heads": 2, "vocabulary": 64},
        "data": {"train": ragged, "evaluation": {"held-out": {**ragged, "arguments": {"samples": 11}}}},
        "batch": {"global_size": global_size, "micro_size": micro_size},
        "optim": {"name": "adamw", "lr": 1e-3, "clip_norm": 0.5},
        "precision": {"compute": "fp32"},
        "run": {"steps": 8},
        **sections,
    }


@cache
def oracle(global_size: int, updates: int = 4) -> Trajectory:
    return recorded(config(global_size), updates=updates)


@pytest.mark.parametrize("ranks", [1, 2, 3, pytest.param(4, marks=pytest.mark.drill)])
def test_ddp_is_the_single_process(ranks: int) -> None:
    configs, oracles = [], []
    for global_size in GLOBAL_SIZES:
        for accumulation in ACCUMULATIONS:
            micro_size = -(-global_size // (ranks * accumulation))
            configs.append(config(global_size, micro_size, parallel={"strategy": "ddp"}))
            oracles.append(oracle(global_size))
    for run, expected in zip(recorded_all(configs, ranks), oracles, strict=True):
        assert differences(run, expected) == []


IN_REPLICAS = HYBRID - DRILLED
"""What four ranks divide into replicas; the others divide by four as by two, which test_proof has, or by three."""
DIVIDED = [name for name in VARIANTS if name not in ("single", "dp", "ddp") and not is_partitioned(name)]


@pytest.mark.parametrize(  # 1 and 2: test_proof
    ("strategy", "ranks"),
    [
        pytest.param(name, ranks, marks=pytest.mark.drill if ranks == 4 and name not in IN_REPLICAS else ())
        for name in DIVIDED
        for ranks in (3, 4)
    ],
)
def test_divided_state_is_the_single_process(strategy: str, ranks: int) -> None:
    parallel = asking_for(strategy, ranks)
    configs, oracles = [], []
    for global_size, accumulation in ((16, 1), (13, 3)):
        configs.append(config(global_size, -(-global_size // (ranks * accumulation)), parallel=parallel))
        oracles.append(oracle(global_size))
    for run, expected in zip(recorded_all(configs, ranks), oracles, strict=True):
        assert differences(run, expected) == []


def test_accumulation_in_one_process_is_one_batch() -> None:
    for micro_size in (1, 3, 5):
        assert differences(recorded(config(13, micro_size)), oracle(13)) == []


def test_weights_under_sgd() -> None:
    """Adam normalizes noise; under SGD a difference of the weights is one of the gradients."""
    sgd = {"optim": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "clip_norm": 0.5}}
    expected = recorded(config(13, **sgd))
    run = recorded(config(13, 2, **sgd), ranks=3)
    for name, values in expected.weights.items():
        assert run.weights[name] == pytest.approx(values, abs=4 * 0.1 * 1e-6), name


def test_fewer_samples_than_the_global_batch() -> None:
    expected = recorded(config(64))
    assert expected.samples == [40, 80, 120, 160]
    assert differences(recorded(config(64, 8), ranks=3), expected) == []


def test_more_ranks_than_samples() -> None:
    expected = recorded(config(2))
    assert differences(recorded(config(2), ranks=4), expected) == []


def test_planted_faults_are_noticed() -> None:
    """The comparison above proves something only if it fails for each of these."""
    assert unnoticed(FAULTS, config(13, 4), oracle(13), ranks=2) == []
