"""Every strategy matches the single process; one that refuses or crashes is reported and harms no other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kit import small
from kit.failures import fails
from kit.layouts import DRILLED, HYBRID, VARIANTS, is_partitioned
from kit.proofs import proved, text
from kit.worlds import in_process

import lockstep
from lockstep.loop.session import components_of
from lockstep.proof.rows import Row, explanation


def _failures(rows: list[Row]) -> list[str]:
    return [explanation(row) for row in rows if not row.passed]


PARTITIONED = {name for name in VARIANTS if is_partitioned(name)}
LEFT_OUT = {
    1: HYBRID | PARTITIONED | {"dp"},
    2: {name for name in PARTITIONED if "+" in name} | {"single", "dp"},
    4: {"single", "dp"},
}
ON_FOUR_RANKS = {"fsdp-hybrid", "pipeline-1f1b+tensor"}
"""Of the strategies that need four ranks; the others are in test_features and test_same_run."""


SEVERAL_STAGES_PER_RANK = {"pipeline-interleaved-1f1b", "pipeline-zero-bubble", "pipeline-zbv"}


@pytest.mark.parametrize(
    ("ranks", "layers", "left_out"),
    [
        pytest.param(2, 2, DRILLED, id="2-2"),
        pytest.param(2, 4, DRILLED, id="2-4"),
        *(pytest.param(*sizes, set(), marks=pytest.mark.drill) for sizes in ((1, 2), (2, 2), (2, 4), (4, 2))),
    ],
)
def test_every_strategy_matches_the_single_process_on_ragged_text(ranks: int, layers: int, left_out: set[str]) -> None:
    """Variants that are left out here have runs in test_same_run, test_pipeline and test_tensor."""
    base = text(7)
    config = {**base, "model": {**base["model"], "layers": layers}}
    strategies = [name for name in VARIANTS if (name in SEVERAL_STAGES_PER_RANK) is (layers == 4)]
    strategies = [name for name in strategies if name not in left_out and (ranks < 4 or name in ON_FOUR_RANKS)]
    rows = proved(config, strategies=strategies, ranks=(ranks,), steps=2)
    assert _failures(rows) == []
    assert {row.strategy for row in rows} == set(strategies) - LEFT_OUT[ranks]
    for name in {row.strategy for row in rows} - {"single"}:
        kinds = {(row.optimizer, row.accumulation > 1) for row in rows if row.strategy == name}
        assert kinds == {("adamw", True), ("sgd", True)} | (set() if "pipeline" in name else {("adamw", False)})
    for row in rows:
        assert row.steps == 2
        assert row.max_loss_difference is not None
        assert row.max_loss_difference <= 1e-6
        assert row.max_gradient_difference is not None
        assert row.max_gradient_difference <= 1e-5


def _verify_and_compare_weights(config: dict[str, Any]) -> tuple[list[Row], bool]:
    model = small.Net()
    before = small.weights(model)
    objects = {"model": model, "train_dataset": small.points(), "objective": small.CrossEntropy()}
    rows = lockstep.verify(config, **objects, strategies=["ddp", "fsdp"], ranks=[2], steps=3)
    after = small.weights(model)
    return rows, all(np.array_equal(before[name], after[name]) for name in before)


def test_a_model_object_is_verified_and_stays_unchanged() -> None:
    config = {"batch": {"global_size": 13}, "launch": {"device": "cpu"}, "run": {"steps": 8}}
    rows, unchanged = in_process(_verify_and_compare_weights, config)
    assert _failures(rows) == []
    assert {row.strategy for row in rows} == {"ddp", "fsdp"}
    assert unchanged


def test_dropout_is_turned_off() -> None:
    dropping = text()
    dropping["model"] = {**dropping["model"], "dropout": 0.2}
    assert _failures(proved(dropping, strategies="ddp", ranks=(2,), steps=2)) == []


def _dies_under_fsdp(session: Any) -> None:
    if components_of(session).plan.strategy == "fsdp" and components_of(session).world.rank == 1:
        raise RuntimeError("injected crash")


def test_a_strategy_that_crashes_does_not_stop_the_others() -> None:
    sgd = text(optim={"name": "sgd", "lr": 0.1})
    rows = proved(sgd, strategies="fsdp,ddp", ranks=(2,), steps=2, tamper=_dies_under_fsdp)
    assert [(row.strategy, row.status) for row in rows] == [("fsdp", "crashed")] * 2 + [("ddp", "passed")] * 2
    assert all("injected crash" in (row.reason or "") and row.passed is False for row in rows[:2])


def test_a_refusal_is_a_row_and_no_failure() -> None:
    offloaded = text(parallel={"fsdp": {"cpu_offload": True}}, run={"steps": 8, "allow_untested": True})
    for config, strategy, word in (
        (text(optim={"name": "muon", "lr": 1e-3}), "zero2", "it updates whole matrices"),  # known before ranks start
        (offloaded, "fsdp", "cpu_offload"),  # noticed by the ranks
    ):
        rows = proved(config, strategies=f"{strategy},ddp", ranks=(2,), steps=2)
        assert [row.status for row in rows if row.strategy == "ddp"] == ["passed"] * 3
        refused = [row for row in rows if row.status == "refused"]
        assert refused
        assert {row.strategy for row in refused} == {strategy}
        assert all(row.passed is None and word in (row.reason or "") for row in refused)


def test_wrong_strategies_are_refused() -> None:
    with fails(lockstep.ConfigError, "'dpp'", "dp"):
        lockstep.verify(text(), strategies="dpp")
    with fails(lockstep.ConfigError, "single on 2 ranks"):
        lockstep.verify(text(), strategies="single", ranks=(2,))


def test_verify_refuses_to_run_inside_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with fails(lockstep.ConfigError, "own ranks"):
        lockstep.verify(text())
