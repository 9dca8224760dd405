"""Whatever the family of the model, the run under each strategy is the single process's."""

from __future__ import annotations

import itertools
from functools import cache
from typing import Any

import numpy as np
import pytest
from kit.families import FAMILIES, family
from kit.layouts import DRILLED, VARIANTS, is_partitioned
from kit.runs import Arrays, Trajectory, differences, recorded_all
from kit.worlds import in_world

from lockstep.loop.session import components_of

SKIPPED = {
    "single": "it is what the others are compared with",
    "dp": "one process over several GPUs",
    "zero0": "ddp with DeepSpeed's engine around it; test_same_run has it",
    "fsdp-no-shard": "ddp by other means; test_same_run has it",
    "fsdp-hybrid-grad-op": "fsdp-grad-op in each replica; test_same_run has it",
}
"""By variant, why it isn't compared here."""
COMPARED = [name for name in VARIANTS if name not in SKIPPED and not is_partitioned(name)]
CHAINS = ("llama", "gpt2", "qwen", "mixtral", "bert", "vit")
UPDATES = 2


def config(name: str, ranks: int = 1, **parallel: Any) -> dict[str, Any]:
    """Updates of 13 samples of unequal lengths, in two micro-batches."""
    return {
        **family(name),
        "batch": {"global_size": 13, "micro_size": -(-13 // (2 * ranks))},
        "optim": {"name": "adamw", "lr": 1e-3, "clip_norm": 0.5},
        "precision": {"compute": "fp32"},
        "parallel": parallel,
        "run": {"steps": UPDATES},
    }


@cache
def oracles() -> dict[str, Trajectory]:
    runs = recorded_all([config(name, strategy="single") for name in FAMILIES], updates=UPDATES)
    return dict(zip(FAMILIES, runs, strict=True))


def off(variant: str, ranks: int, **parallel: Any) -> dict[str, list[str]]:
    """What each family does otherwise than on the single process; all families in one world."""
    configs = [config(name, ranks, **VARIANTS[variant], **parallel) for name in FAMILIES]
    runs = recorded_all(configs, ranks, UPDATES)
    found = {name: differences(run, oracles()[name]) for name, run in zip(FAMILIES, runs, strict=True)}
    return {name: lines for name, lines in found.items() if lines}


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=pytest.mark.drill if name in DRILLED else ())
        for name in COMPARED
        if "hybrid" not in name
    ],
)
def test_every_family_is_the_single_process(variant: str) -> None:
    assert off(variant, ranks=3 if variant == "fsdp" else 2) == {}


def test_every_family_in_two_replicas_of_two_parts() -> None:
    assert off("fsdp-hybrid", ranks=4, data=2) == {}


def test_a_family_whose_blocks_form_a_chain_goes_through_a_pipeline() -> None:
    """Two stages; what a family ties is on both."""
    configs = [config(name, 1, strategy="ddp", pipeline=2) for name in CHAINS]
    for name, run in zip(CHAINS, recorded_all(configs, 2, UPDATES), strict=True):
        assert differences(run, oracles()[name]) == [], name


# --- the start ------------------------------------------------------------------------------------------------------


def first_weights(configs: list[dict[str, Any]]) -> list[Arrays]:
    """Whole, before any update, on one rank."""
    import torch.distributed as dist

    import lockstep

    found = []
    dist.init_process_group("gloo")
    try:
        for asked in configs:
            with lockstep.session(asked) as session:
                found.append(
                    {name: value.clone().numpy() for name, value in components_of(session).sharding.state.weights()}
                )
    finally:
        dist.destroy_process_group()
    return found


def test_every_strategy_starts_from_the_same_bits() -> None:
    """Each with half of the families, and each family under half of them."""
    variants = [variant for variant in COMPARED if variant not in DRILLED]
    pairs = itertools.product(enumerate(FAMILIES), enumerate(variants))
    rows = [(name, variant) for (row, name), (column, variant) in pairs if (row + column) % 2 == 0]
    expected = dict(zip(FAMILIES, in_world(1, first_weights, [config(name) for name in FAMILIES])[0], strict=True))
    configs = [config(name, 2, **VARIANTS[variant]) for name, variant in rows]
    for on_a_rank in in_world(2, first_weights, configs):
        for (name, variant), weights in zip(rows, on_a_rank, strict=True):
            assert list(weights) == list(expected[name]), (name, variant)
            for parameter, values in expected[name].items():
                assert np.array_equal(weights[parameter], values), (name, variant, parameter)
