"""Layers that some samples leave out: a rank may have no gradient for what another has one for."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from kit.runs import Trajectory, differences, recorded, recorded_all
from kit.small import config

from lockstep.plan.variants import VARIANTS

UPDATES = 5


def experts(micro_size: int, decay: float = 0.1, **parallel: Any) -> dict[str, Any]:
    """Updates of four points: which of two layers a micro-batch uses is up to its points."""
    return config(
        "Experts",
        batch={"global_size": 4, "micro_size": micro_size},
        optim={"name": "sgd", "lr": 0.1, "weight_decay": decay, "decay": "all"},
        parallel={**parallel, "ddp": {"find_unused_parameters": True}},
    )


@cache
def oracle() -> Trajectory:
    return recorded(experts(4, strategy="single"), updates=UPDATES)


def test_some_updates_leave_a_layer_out_and_others_don_t() -> None:
    assert {"high.weight" in gradients for gradients in oracle().gradients} == {True, False}


@pytest.mark.parametrize(
    ("ranks", "variant"),
    [(2, "ddp"), (2, "fsdp"), (4, "fsdp"), (2, "fsdp-grad-op"), (2, "fsdp-no-shard"), (4, "fsdp-hybrid")],
)
def test_a_layer_that_one_rank_leaves_out(ranks: int, variant: str) -> None:
    """One that all leave out is left alone, as on one process: it doesn't decay."""
    parallel: dict[str, Any] = {**VARIANTS[variant], **({"data": 2} if "hybrid" in variant else {})}
    wide, narrow = experts(4 // ranks, **parallel), experts(1, **parallel)
    for run in recorded_all([wide, narrow], ranks, UPDATES):
        assert differences(run, oracle()) == []
        assert [sorted(found) for found in run.gradients] == [sorted(found) for found in oracle().gradients]
        for name, values in oracle().weights.items():
            assert run.weights[name] == pytest.approx(values, abs=1e-6), name


def test_a_layer_left_out_while_each_micro_batch_is_reduced() -> None:
    asked = experts(1, strategy="fsdp", fsdp={"reduce_every": "micro-batch"})
    assert differences(recorded(asked, 2, UPDATES), oracle()) == []
