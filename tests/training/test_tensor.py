"""Tensor parallelism: however matrices, sequences and losses are divided, the run is the single process's."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from kit.runs import Trajectory, differences, recorded, recorded_all
from training.test_same_run import config

SGD = {"optim": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "clip_norm": 0.5}}  # it doesn't blow rounding up
LOSS, SEQUENCE = {"loss_parallel": True}, {"sequence_parallel": True}


def text(
    global_size: int = 13, *, tied: bool = True, model: dict[str, Any] | None = None, **parallel: Any
) -> dict[str, Any]:
    """Ragged text, in micro-batches of unequal sizes and lengths, which two ranks can't halve."""
    asked = config(global_size, 3, parallel={"strategy": "ddp", **parallel}, **SGD)
    return {**asked, "model": {**asked["model"], "tie_embeddings": tied, **(model or {})}}


@cache
def oracle(tied: bool) -> Trajectory:
    return recorded(text(tied=tied, strategy="single"))


# --- the same run -------------------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "matrices": {},
    "and loss": {"tensor_parallel": LOSS},
    "and sequence": {"tensor_parallel": SEQUENCE},
    "and both": {"tensor_parallel": {**SEQUENCE, **LOSS}},
}
PRODUCTS: dict[str, dict[str, Any]] = {
    "x ddp": {},
    "x fsdp": {"strategy": "fsdp"},
    "x fsdp, and all": {"strategy": "fsdp", "tensor_parallel": {**SEQUENCE, **LOSS}},
    "x pipeline, and loss": {"pipeline": 2, "tensor_parallel": LOSS},
}


@pytest.mark.parametrize("tied", [True, False])
def test_on_two_ranks(tied: bool) -> None:
    runs = recorded_all([text(tied=tied, tensor=2, **way) for way in WAYS.values()], 2)
    for name, run in zip(WAYS, runs, strict=True):
        assert differences(run, oracle(tied)) == [], name


def test_products_on_four_ranks() -> None:
    runs = recorded_all([text(tensor=2, **product) for product in PRODUCTS.values()], 4)
    for name, run in zip(PRODUCTS, runs, strict=True):
        assert differences(run, oracle(True)) == [], name


def test_pipeline_x_tensor_x_fsdp_on_eight_ranks() -> None:
    run = recorded(text(tensor=2, pipeline=2, strategy="fsdp"), 8, updates=2)
    expected = oracle(True)
    assert run.losses == pytest.approx(expected.losses[:2], rel=1e-6)
    assert run.norms == pytest.approx(expected.norms[:2], rel=1e-5)
