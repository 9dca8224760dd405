"""Pipelines: whatever the schedule, the stages and what else divides the run, it is the single process's."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit import small
from kit.failures import gives
from kit.families import family
from kit.faults import OF_PIECES
from kit.runs import Trajectory, differences, recorded, recorded_all, unnoticed
from kit.worlds import in_world
from training.test_same_run import config

import lockstep
from lockstep.checkpoint.local import LocalStorage
from lockstep.config.loading import validate
from lockstep.core.records import DataFacts, ParameterFacts
from lockstep.plan.plan import make_plan
from lockstep.resuming.checkpoints import Checkpoints
from lockstep.resuming.resuming import Resume

SCHEDULES = ("gpipe", "1f1b", "interleaved-1f1b", "zero-bubble", "zbv")
SGD = {"optim": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "clip_norm": 0.5}}  # it doesn't blow rounding up
UPDATES = 4  # the fourth ends the epoch, with fewer samples


def text(global_size: int, micro_size: int | str, *, tied: bool = True, **parallel: Any) -> dict[str, Any]:
    """Ragged text through four blocks."""
    asked = config(global_size, micro_size, parallel={"strategy": "ddp", **parallel}, **SGD)
    return {**asked, "model": {**asked["model"], "layers": 4, "tie_embeddings": tied}}


@cache
def oracle(global_size: int, tied: bool, updates: int = UPDATES) -> Trajectory:
    return recorded(text(global_size, "auto", tied=tied, strategy="single"), updates=updates)


def pipeline(ranks: int, schedule: str, **further: Any) -> dict[str, Any]:
    return {"pipeline": ranks, "pipeline_parallel": {"schedule": schedule}, **further}


# --- the same run -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_two_stages_of_ragged_text(schedule: str) -> None:
    """In updates that fill the pipeline, in some that don't, and in micro-batches of unequal sizes."""
    rows = [(16, 2, True), (13, 7, False), (16, "auto", False)]
    runs = recorded_all([text(size, micro, tied=tied, **pipeline(2, schedule)) for size, micro, tied in rows], 2)
    for (size, _, tied), run in zip(rows, runs, strict=True):
        assert differences(run, oracle(size, tied)) == []


PRODUCTS: dict[str, dict[str, Any]] = {
    "four stages": pipeline(4, "1f1b"),
    "two stages x two replicas": pipeline(2, "1f1b"),
    "two stages, interleaved, x two replicas": pipeline(2, "interleaved-1f1b"),
    "two stages, zbv, x two replicas": pipeline(2, "zbv"),
    "two stages x fsdp": pipeline(2, "1f1b", strategy="fsdp"),
    "two stages, interleaved, x fsdp": pipeline(2, "interleaved-1f1b", strategy="fsdp"),
    "two stages x fsdp, not gathered twice": pipeline(
        2, "gpipe", strategy="fsdp", fsdp={"sharding_strategy": "SHARD_GRAD_OP"}
    ),
    "two stages x two replicas of fsdp": pipeline(
        2, "1f1b", strategy="fsdp", data=2, fsdp={"sharding_strategy": "HYBRID_SHARD"}
    ),
    "cut by hand": pipeline(2, "1f1b") | {"pipeline_parallel": {"split": ["blocks.1"]}},
}


VARIED = [name for name in PRODUCTS if "interleaved" in name or "twice" in name]
"""Of which each part is in another product, or in runs on two ranks."""


@pytest.mark.parametrize(
    "names",
    [[name for name in PRODUCTS if name not in VARIED], pytest.param(VARIED, marks=pytest.mark.drill)],
    ids=["most", "varied"],
)
def test_products(names: list[str]) -> None:
    expected = recorded(text(13, "auto", strategy="single"), updates=2)
    runs = recorded_all([text(13, 2, **PRODUCTS[name]) for name in names], 4, updates=2)
    for name, run in zip(names, runs, strict=True):
        assert differences(run, expected) == [], name


def chain(model: str, micro: int = 3, **parallel: Any) -> dict[str, Any]:
    asked = small.config(parallel={"strategy": "ddp", **parallel}, batch={"global_size": 13, "micro_size": micro})
    return {**asked, "model": {"kind": "custom", "target": f"kit.chains:{model}"}, **SGD}


@pytest.mark.parametrize("model", ["Chain", "unequal", "Turned", "HeadFirst"])
def test_models_of_a_users_own(model: str) -> None:
    ways = [*(pipeline(2, schedule) for schedule in SCHEDULES), pipeline(2, "1f1b", strategy="fsdp")]
    configs = [chain(model, **parallel) for parallel in ways]
    expected = recorded(chain(model, strategy="single"), updates=2)
    for parallel, run in zip(ways, recorded_all(configs, 2, updates=2), strict=True):
        assert differences(run, expected) == [], parallel


OPT = {
    "model_type": "opt", "vocab_size": 64, "num_hidden_layers": 2, "hidden_size": 24, "word_embed_proj_dim": 24,
    "num_attention_heads": 2, "ffn_dim": 20, "max_position_embeddings": 32, "dropout": 0.0, "layerdrop": 0.0,
}  # fmt: skip


def test_a_model_whose_last_norm_is_defined_before_its_blocks() -> None:
    """Of the transformers library, without values at first; its head is tied to the table."""
    of = family("gpt2")
    asked = {**config(13, 3, **SGD), **of, "model": {**of["model"], "architecture": OPT}}
    expected = recorded({**asked, "parallel": {"strategy": "single"}}, updates=2)
    cut = [{**asked, "parallel": {"strategy": strategy, **pipeline(2, "1f1b")}} for strategy in ("ddp", "fsdp")]
    assert [differences(run, expected) for run in recorded_all(cut, 2, updates=2)] == [[], []]


def test_running_means() -> None:
    """Each stage's own; a micro-batch's statistics depend on its size, not on the stages."""
    sizes = {"batch": {"global_size": 12, "micro_size": 6}}
    expected = recorded({**chain("WithNorms", strategy="single"), **sizes})
    run = recorded({**chain("WithNorms", **pipeline(2, "1f1b")), **sizes}, 2)
    assert differences(run, expected, noise=1e-7) == [], "gradients of biases before a norm are rounding alone"
    assert any("running_mean" in name for name in expected.weights)
    for name, values in expected.weights.items():
        np.testing.assert_allclose(run.weights[name], values, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision(precision: str) -> None:
    asked = {**text(16, 4, **pipeline(2, "1f1b")), "precision": {"compute": precision}}
    alone = {**text(16, 4, strategy="single"), "precision": {"compute": precision}}
    assert recorded(asked, 2, updates=2).losses == pytest.approx(recorded(alone, updates=2).losses, rel=2e-3)


def test_planted_faults_are_noticed() -> None:
    of_all = ("a mean of means", "one swapped sample", "a cursor off by one", "a clip norm of one rank")
    assert (
        unnoticed((*of_all, *OF_PIECES), text(13, 4, **pipeline(2, "1f1b")), oracle(13, True, 2), ranks=2, updates=2)
        == []
    )


# --- what it can't do ---------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "weights on both sides of the blocks": (
        chain("BothSides", **pipeline(2, "1f1b")),
        "offset is used before the blocks and after them, on two stages",
    ),
    "blocks that take more": (
        chain("Skips", **pipeline(2, "1f1b")),
        "blocks.2 takes more than the output of blocks.1: a tensor made with lift.weight",
    ),
    "code between blocks": (
        chain("Between", **pipeline(2, "1f1b")),
        "the model's forward computes something between blocks.1 and blocks.2",
    ),
    "what changes in place between blocks": (
        chain("InPlace", **pipeline(2, "1f1b")),
        "the model's forward computes something between blocks.1 and blocks.2",
    ),
    "blocks that are left out": (
        chain("LeavesOut", **pipeline(2, "1f1b")),
        "norm.weight belongs after the blocks, and is used before the last block is called",
    ),
    "what was computed before the blocks": (
        chain("Keeps", **pipeline(2, "1f1b")),
        "a result of lift.weight before the blocks, or from the output of an earlier block, is used",
    ),
    "blocks that are met twice": (chain("Twice", **pipeline(2, "1f1b")), "blocks.0 is called twice or out of order"),
    "blocks that share": (chain("Repeats", **pipeline(2, "1f1b")), "blocks.3.inner.weight is tied to blocks.0.inner"),
    "no blocks": (small.config(parallel={"strategy": "ddp", "pipeline": 2}), "Net has no repeated blocks"),
    "too few blocks": (
        text(13, 2, pipeline=2, pipeline_parallel={"schedule": "interleaved-1f1b", "stages_per_rank": 3}),
        "2 x 3 = 6 stages, but Transformer has 4 blocks",
    ),
    "two lists": (
        {**config(13), **family("t5"), "parallel": {"strategy": "ddp", "pipeline": 2}},
        "several lists of blocks (encoder.block, decoder.block)",
    ),
    "a name that isn't there": (
        text(13, 2, pipeline=2, pipeline_parallel={"split": ["blocks.9"]}),
        "blocks.9: name the first block of each of the 2 stages",
    ),
    "too many names": (
        text(13, 2, pipeline=2, pipeline_parallel={"split": ["blocks.1", "blocks.2"]}),
        "blocks.1, blocks.2: name the first block of each of the 2 stages",
    ),
    "fsdp beside zero-bubble": (text(13, 2, **pipeline(2, "zbv", strategy="fsdp")), "FSDP doesn't see them"),
    "options of DDP": (text(13, 2, ddp={"bucket_mb": 1.0}, **pipeline(2, "1f1b")), "leave it out"),
    "stages of 1f1b": (
        text(13, 2, pipeline=2, pipeline_parallel={"stages_per_rank": 2}),
        "2, but 1f1b has 1 a rank; take interleaved-1f1b",
    ),
    "deepspeed": (text(13, 2, strategy="deepspeed", pipeline=2), "deepspeed doesn't go with parallel.pipeline 2"),
    "a mesh that doesn't multiply out": (text(13, 2, pipeline=3), "Start 3 ranks"),
    "the same bits": (
        {**text(13, 2, pipeline=2), "run": {"steps": 8, "determinism": "invariant"}},
        "invariant needs every rank to compute the whole model",
    ),
}


@pytest.fixture(scope="module")
def refusals() -> dict[str, list[str]]:
    """The errors of two ranks, separately."""
    found = in_world(2, small.refusals, [asked for asked, _ in REFUSED.values()])
    return {name: [said[number] for said in found] for number, name in enumerate(REFUSED)}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_t_be_done_says_why(name: str, refusals: dict[str, list[str]]) -> None:
    assert all(REFUSED[name][1] in said for said in refusals[name]), refusals[name]


def test_code_between_blocks_that_runs_in_training_alone_is_noticed_there() -> None:
    """Refused by the stage that would not know of it; the other one is informed of its end."""
    said = in_world(2, small.refusal, chain("InTraining", **pipeline(2, "1f1b")))
    assert gives(said[1], "forward", "blocks.1", "blocks.2")


def test_a_long_wait_is_warned_of() -> None:
    asked = validate(
        {**small.config(), "parallel": {"strategy": "ddp", "pipeline": 2}, "batch": {"global_size": 8, "micro_size": 4}}
    )
    plan = make_plan(asked.config, 2, DataFacts(40, None), [ParameterFacts("weight", (4, 4), 4, True)])
    assert any(gives(warning, "33%", "batch.micro_size to 1") for warning in plan.warnings)


# --- what users do next -------------------------------------------------------------------------------------------


def test_dropout_trains() -> None:
    asked = text(16, 4, **pipeline(2, "1f1b"))
    asked["model"]["dropout"] = 0.1
    run, again = recorded_all([asked, asked], 2, updates=6)
    assert run.losses == again.losses
    assert run.losses[-1] < run.losses[0]


RULES = [{"match": ["head.*"], "lr_scale": 0.5}, {"match": ["lift.*"], "weight_decay": 0.0}]
"""Of which each stage has some parameters."""


def _told(asked: dict[str, Any], folder: Path) -> None:
    lockstep.train({**asked, "run": {"steps": 4, "folder": str(folder)}, "monitor": {"every": 4, "progress": "none"}})


def _logged(folder: Path) -> Any:
    lines = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return next(line["logged"] for line in lines if "logged" in line)


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b"])
def test_what_a_model_logs_is_told_by_the_stage_that_computes_it(schedule: str, tmp_path: Path) -> None:
    in_world(1, _told, chain("Telling", strategy="single"), tmp_path / "alone")
    in_world(2, _told, chain("Telling", **pipeline(2, schedule)), tmp_path / "cut")
    alone, cut = (_logged(tmp_path / name) for name in ("alone", "cut"))
    assert cut == pytest.approx(alone, rel=1e-5)
    assert alone.keys() == {"before", "in", "after"}


def test_rules_are_the_whole_models() -> None:
    ways = [{}, pipeline(2, "1f1b"), pipeline(2, "1f1b", strategy="fsdp")]
    optim = {"optim": {"name": "adamw", "lr": 0.01, "rules": RULES}}
    alone, *runs = (
        recorded({**chain("Chain", **parallel), **optim}, ranks, updates=2)
        for parallel, ranks in zip(ways, (1, 2, 4), strict=True)
    )
    assert [differences(run, alone) for run in runs] == [[], []]


@pytest.mark.parametrize("frozen", [["lift.*", "offset", "blocks.0.*", "blocks.1.*"], ["blocks.3.*", "head.*"]])
def test_a_stage_may_train_nothing(frozen: list[str]) -> None:
    asked = [chain("Chain", **parallel) for parallel in ({}, pipeline(2, "1f1b"), pipeline(4, "1f1b"))]
    asked = [{**one, "model": {**one["model"], "freeze": frozen}} for one in asked]
    alone, *runs = (recorded(one, ranks, updates=2) for one, ranks in zip(asked, (1, 2, 4), strict=True))
    assert [differences(run, alone) for run in runs] == [[], []]


def _adam(groups: Any) -> Any:
    import torch

    return torch.optim.Adam(groups)


def _counting(groups: Any) -> Any:
    import torch

    class Counting(torch.optim.SGD):
        """Keeps a number in its groups, which gradients decide."""

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group["seen"] = group.get("seen", 0.0) + sum(float(one.grad.norm()) for one in group["params"])
            super().step()

    return Counting(groups)


def _handed_over(make: Any, parallel: dict[str, Any], folder: str) -> tuple[list[float], int | None] | str:
    asked = {**chain("Chain", **parallel), "optim": {"lr": 0.01, "rules": RULES}}
    try:
        with small.in_group(), lockstep.session(asked, optimizer=make) as session:
            checkpoints = Checkpoints(session, LocalStorage(Path(folder)), {})
            checkpoints.begin(Resume())
            losses = []
            for report in session:
                losses.append(report.loss)
                if report.step == 2:
                    checkpoints.save()
            assert all(ended.failure is None for ended in checkpoints.finish())
            return losses, checkpoints.resumed_from
    except lockstep.RunFailed as failure:
        return str(failure)


def test_an_optimizer_of_a_users_own_trains_each_stage_and_goes_on_anywhere(tmp_path: Path) -> None:
    one, other = in_world(2, _handed_over, _adam, pipeline(2, "1f1b"), str(tmp_path))
    assert one == other
    losses, resumed = one
    again, since = in_world(1, _handed_over, _adam, {}, str(tmp_path))[0]
    assert (resumed, since) == (None, 2)
    assert again == pytest.approx(losses[2:], rel=1e-5)


def test_an_optimizer_that_sums_over_its_groups_is_not_saved_in_pieces(tmp_path: Path) -> None:
    for said in in_world(2, _handed_over, _counting, pipeline(2, "1f1b"), str(tmp_path)):
        assert "differs between the stages of the pipeline" in said
