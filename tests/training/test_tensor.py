"""Tensor parallelism: however matrices, sequences and losses are divided, the run is the single process's."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kit import small
from kit.failures import gives
from kit.families import family
from kit.runs import Trajectory, differences, recorded, recorded_all, unnoticed
from kit.worlds import in_world
from training import test_checkpoint_pairs as pairs
from training.test_same_run import config

import lockstep
from lockstep.loop.session import components_of

SGD = {"optim": {"name": "sgd", "lr": 0.1, "momentum": 0.9, "clip_norm": 0.5}}  # it doesn't blow rounding up
LOSS, SEQUENCE = {"loss_parallel": True}, {"sequence_parallel": True}


def text(
    global_size: int = 7, *, tied: bool = True, model: dict[str, Any] | None = None, **parallel: Any
) -> dict[str, Any]:
    """Ragged text, in micro-batches of unequal sizes and lengths, which two ranks can't halve."""
    asked = config(global_size, 3, parallel={"strategy": "ddp", **parallel}, **SGD)
    return {**asked, "model": {**asked["model"], "tie_embeddings": tied, **(model or {})}}


@cache
def oracle(updates: int = 4) -> Trajectory:
    return recorded(text(strategy="single"), updates=updates)


# --- the same run -------------------------------------------------------------------------------------------------

WAYS: dict[str, dict[str, Any]] = {
    "matrices": {},
    "and loss": {"tensor_parallel": LOSS},
    "and sequence": {"tensor_parallel": SEQUENCE},
    "and both": {"tensor_parallel": {**SEQUENCE, **LOSS}},
}
PRODUCTS: dict[str, dict[str, Any]] = {
    "x fsdp, and all": {"strategy": "fsdp", "tensor_parallel": {**SEQUENCE, **LOSS}},
    "x pipeline, and loss": {"pipeline": 2, "tensor_parallel": LOSS},
}


@pytest.mark.parametrize(
    "names",
    [["matrices", "and both"], pytest.param(["and loss", "and sequence"], marks=pytest.mark.drill)],
    ids=["none and all", "one"],
)
def test_on_two_ranks(names: list[str]) -> None:
    """One alone: below, where nothing divides the vocabulary."""
    runs = recorded_all([text(tensor=2, **WAYS[name]) for name in names], 2, updates=2)
    for name, run in zip(names, runs, strict=True):
        assert differences(run, oracle(2)) == [], name


def test_products_on_four_ranks() -> None:
    runs = recorded_all([text(tensor=2, **product) for product in PRODUCTS.values()], 4, updates=2)
    for name, run in zip(PRODUCTS, runs, strict=True):
        assert differences(run, oracle(2)) == [], name


@pytest.mark.drill
def test_products_on_eight_ranks() -> None:
    """Pipeline x fsdp, and two replicas of fsdp's."""
    hybrid = {"data": 2, "fsdp": {"sharding_strategy": "HYBRID_SHARD"}}
    asked = [text(tensor=2, strategy="fsdp", **further) for further in ({"pipeline": 2}, hybrid)]
    for run in recorded_all(asked, 8, updates=1):
        assert run.losses == pytest.approx(oracle().losses[:1], rel=1e-6)
        assert run.norms == pytest.approx(oracle().norms[:1], rel=1e-5)


def test_a_vocabulary_that_nothing_divides() -> None:
    """65 tokens, in an embedding and a head of their own: of these, and of logits, one rank has more than the other."""
    odd: dict[str, Any] = {"tied": False, "model": {"vocabulary": 65}}
    expected = recorded(text(**odd, strategy="single"), updates=2)
    ways = ({"tensor_parallel": LOSS}, {"tensor_parallel": SEQUENCE})
    for way, run in zip(ways, recorded_all([text(**odd, tensor=2, **way) for way in ways], 2, updates=2), strict=True):
        assert differences(run, expected) == [], way


def test_label_smoothing_of_divided_logits() -> None:
    smoothed = {"objective": {"label_smoothing": 0.1}}
    run = recorded({**text(tensor=2, tensor_parallel=LOSS), **smoothed}, 2, updates=1)
    assert differences(run, recorded({**text(strategy="single"), **smoothed}, updates=1)) == []


_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
DECODERS = {
    "llama": {"attention_bias": True},
    "qwen3": {"head_dim": 10, "tie_word_embeddings": True},
    "olmo2": {},
    "phi3": {"pad_token_id": 0},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen3_moe": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 12, "mlp_only_layers": [1],
        "norm_topk_prob": True,
    },
}  # fmt: skip


def decoder(name: str, of: dict[str, Any] | None = None, **parallel: Any) -> dict[str, Any]:
    """`of`: what its config has otherwise."""
    asked = {**text(), **family("llama"), "parallel": {"strategy": "ddp", **parallel}}
    architecture = {**asked["model"]["architecture"], **_HEADS, "model_type": name, **DECODERS[name], **(of or {})}
    return {**asked, "model": {**asked["model"], "architecture": architecture}}


def test_plans_of_the_transformers_library() -> None:
    """Whole heads, norms of each rank's own heads, outcomes that are put together, matrices that hold several."""
    expected = recorded_all([decoder(name, strategy="single") for name in DECODERS], updates=2)
    divided = [decoder(name, tensor=2, tensor_parallel=LOSS) for name in DECODERS]
    for name, run, alone in zip(DECODERS, recorded_all(divided, 2, updates=2), expected, strict=True):
        assert differences(run, alone) == [], name


@pytest.mark.parametrize(
    "product", [{"strategy": "fsdp"}, pytest.param({"pipeline": 2}, marks=pytest.mark.drill)], ids=["fsdp", "pipeline"]
)
def test_divided_experts_in_products(product: dict[str, Any]) -> None:
    expected = recorded(decoder("mixtral", strategy="single"), updates=1)
    assert differences(recorded(decoder("mixtral", tensor=2, **product), 4, updates=1), expected) == []


RIGHT = {
    **dict.fromkeys(("layers.*.query", "layers.*.key", "layers.*.value", "layers.*.up"), "colwise"),
    **dict.fromkeys(("layers.*.out", "layers.*.down", "table"), "rowwise"),
    "layers.*.of_heads": "sum_gradient",
    "head": "colwise_gather_output",
}
FUSED = {"layers.*.mixed": "colwise", "layers.*.out": "rowwise"}


def planned(changes: dict[str, str | None], of: str = "Decoder", **parallel: Any) -> dict[str, Any]:
    """By the right plan of a model of a user's own, but for the changes; None: left out."""
    plan = FUSED if of == "fused" else RIGHT
    plan = {name: style for name, style in {**plan, **changes}.items() if style is not None}
    asked = text(**{"tensor": 2, "tensor_parallel": {"plan": plan}, **parallel})
    model = {"kind": "custom", "target": f"training.tensor_models:{of}"}
    return {**asked, "model": model, "objective": {"kind": "next-token"}}


def own(plan: dict[str, str] | str, **sections: Any) -> dict[str, Any]:
    return small.config(parallel={"strategy": "ddp", "tensor": 2, "tensor_parallel": {"plan": plan}}, **sections)


@pytest.mark.parametrize("named", [{"head": "colwise_gather_output"}, {"table": "rowwise"}])
def test_a_table_and_a_head_that_are_tied_are_divided_together(named: dict[str, str]) -> None:
    plan = {**dict.fromkeys(RIGHT), **named}
    asked = undropped(planned(plan, "tied"))
    expected = recorded({**asked, "parallel": {"strategy": "ddp"}}, updates=2)
    assert differences(recorded(asked, 2, updates=2), expected) == []


def test_a_plan_of_a_users_own() -> None:
    run = recorded(own({"inner": "colwise", "head": "rowwise"}), 2)
    assert differences(run, recorded(small.config())) == []


def undropped(asked: dict[str, Any]) -> dict[str, Any]:
    """What is drawn for a rank's own positions, or by a stage, isn't the single process's."""
    return {**asked, "model": {**asked["model"], "arguments": {"drop": 0.0}}}


def test_a_model_that_counts_its_calls_is_not_rehearsed_into_another() -> None:
    counting = {"kind": "custom", "target": "training.context_models:Changing"}
    plan = {"plan": {"head": "colwise_gather_output"}}
    asked = {**text(tensor=2, tensor_parallel=plan), "model": counting, "objective": {"kind": "next-token"}}
    expected = recorded({**asked, "parallel": {"strategy": "ddp"}}, updates=3)
    assert differences(recorded(asked, 2, updates=3), expected) == []


def test_a_plan_that_is_rehearsed() -> None:
    """Also with activation checkpointing or stages; nothing of the dry run is left."""
    expected = recorded(undropped(planned({}, tensor=1)), updates=1)
    fsdp = {**planned({}, strategy="fsdp"), "memory": {"activation_checkpointing": {"mode": "full"}}}
    for run in recorded_all([undropped(fsdp), undropped(planned({}, pipeline=2))], 4, updates=1):
        assert differences(run, expected) == []


def test_planted_faults_are_noticed() -> None:
    faults = ("a mean of means", "one swapped sample", "a clip norm of one rank")
    assert unnoticed(faults, text(tensor=2), oracle(2), ranks=2, updates=2) == []


# --- what users do next -------------------------------------------------------------------------------------------


def _drawn() -> tuple[np.ndarray, list[float]]:
    """What dropout leaves of ones on this rank's positions, and losses."""
    import torch

    asked = text(tensor=2, tensor_parallel=SEQUENCE, model={"dropout": 0.5})
    with lockstep.session(asked) as session:
        dropped: list[Any] = []
        first: Any = components_of(session).sharding.state.model.get_submodule("dropout")
        first.register_forward_hook(lambda module, inputs, output: dropped.append((output != 0).to_local()))
        losses = [report.loss for report, _ in zip(session, range(2), strict=False)]
    length = min(one.shape[1] for one in dropped[:1])
    return torch.as_tensor(dropped[0][:, :length]).numpy(), losses


def test_by_sequence_each_rank_drops_other_elements() -> None:
    (first, losses), (second, others) = in_world(2, _drawn)
    assert losses == others
    samples, positions = min(first.shape[0], second.shape[0]), min(first.shape[1], second.shape[1])
    here, there = first[:samples, :positions], second[:samples, :positions]
    assert 0.3 < np.mean(here != there) < 0.7


@pytest.mark.drill
def test_checkpoints_of_divided_stages(tmp_path: Path) -> None:
    """Pipeline x tensor, saved on four ranks: resumed on one, and back. Other pairs are in test_checkpoint_pairs."""
    cut = "pipeline-1f1b+tensor"
    saved = in_world(4, pairs.save_all, [cut], str(tmp_path))[0]
    saved |= in_world(1, pairs.save_all, ["single"], str(tmp_path))[0]
    found = in_world(1, pairs.resume_all, [cut], "single", str(tmp_path))[0]
    found |= in_world(4, pairs.resume_all, ["single"], cut, str(tmp_path))[0]
    for (source, target), run in found.items():
        assert pairs._difference(saved[source], run) == "", (source, target)


# --- what it can't do ---------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no plan": (own("auto"), "a Net carries no plan"),
    "a family without one": (
        {**text(), **family("gpt2"), "parallel": {"strategy": "ddp", "tensor": 2}},
        "a GPT2LMHeadModel carries no plan: Llama, Qwen2",
    ),
    "a module that isn't there": (
        own({"iner": "colwise"}),
        "no module of the model is called iner; did you mean inner?",
    ),
    "a style that isn't there": (
        own({"inner": "colwize"}),
        "inner: there is no style 'colwize'; did you mean colwise?",
    ),
    "a style for something else": (own({"": "colwise"}), "no module of the model is called"),
    "columns that don't divide": (own({"head": "colwise"}), "2 doesn't divide the 3 columns of head (colwise)"),
    "heads that don't divide": (
        {**text(), **family("llama"), "parallel": {"strategy": "ddp", "tensor": 2}},
        "2 doesn't divide the 1 key-value heads; take 1",
    ),
    "experts that don't divide": (
        decoder("mixtral", {"num_local_experts": 3}, tensor=2),
        "2 doesn't divide the 3 experts; take 1 or 3",
    ),
    "our heads": (text(tensor=2, model={"heads": 4, "kv_heads": 1}), "2 doesn't divide the 1 key-value heads; take 1"),
    "a mesh that doesn't multiply out": (text(tensor=3), "Start 3 ranks"),
    "sequences of the transformers library": (
        decoder("llama", tensor=2, tensor_parallel=SEQUENCE),
        "don't name where to shard a sequence",
    ),
    "logits of a plan without a head": (
        own({"inner": "colwise", "head": "rowwise"})
        | {
            "parallel": {
                "strategy": "ddp",
                "tensor": 2,
                "tensor_parallel": {"plan": {"inner": "colwise", "head": "rowwise"}, "loss_parallel": True},
            }
        },
        "with colwise_gather_output for the last module, head",
    ),
    "weights of own columns": (
        planned({"layers.*.of_heads": None}),
        "gradient of layers.1.of_heads.weight differs between tensor-parallel and whole matrices",
    ),
    "weights of all columns": (
        planned({"layers.*.before": "sum_gradient"}),
        "gradient of layers.1.before.weight differs between tensor-parallel and whole matrices",
    ),
    "three matrices in one": (
        planned({}, "fused"),
        "gradient of layers.1.out.weight differs between tensor-parallel and whole matrices",
    ),
    "a plan of nothing": (own({}), "it divides no matrix; name some"),
    "a plan of norms": (planned({**dict.fromkeys(RIGHT), "layers.*.norm": "sum_gradient"}), "it divides no matrix"),
    "a style of matrices on a block": (
        planned({"layers.*": "colwise"}),
        "layers.0: colwise is for Linear and Embedding modules, not for a Block; in it are norm, query, key, value",
    ),
    "a style of norms on a block": (
        planned({"layers.*": "sequence"}),
        "layers.0: sequence is for a module with weights of its own, such as a norm, not for a Block; in it are norm",
    ),
    "sequences that no style divides": (
        planned({}, tensor_parallel={"plan": RIGHT, **SEQUENCE}),
        "sequence_parallel: true, but no style of the plan divides a sequence",
    ),
    "sequences that were not requested": (
        planned({"layers.*.norm": "sequence"}),
        "sequence_parallel: false, but the plan divides sequences (layers.0.norm: sequence); write true",
    ),
    "an input by keyword": (
        planned({}, "by_keyword"),
        "head fails with tensor-parallel matrices: it is called with its input by keyword; pass it by position",
    ),
    "columns that are never put together": (
        planned({"head": "colwise"}),
        "differs between tensor-parallel and whole matrices. Usual reasons",
    ),
    "columns that something whole is given": (
        planned({"layers.*.down": None}),
        "layers.0.down fails with tensor-parallel matrices: mat1 and mat2 shapes cannot be multiplied",
    ),
    "positions that something whole is given": (
        planned({}, tensor_parallel={"plan": {"layers.*.norm": "sequence", "head": "colwise"}, **SEQUENCE}),
        "layers.0.query fails with tensor-parallel matrices: its input is sharded over ranks",
    ),
    "options of DDP": (text(tensor=2, ddp={"compression": "fp16"}), "leave it out"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_t_be_done_says_why(name: str, refusals: dict[str, list[str]]) -> None:
    assert all(REFUSED[name][1] in said for said in refusals[name]), refusals[name]


WRONG_ON_FOUR: dict[str, tuple[dict[str, Any], str]] = {
    "own columns x fsdp": (
        planned({"layers.*.of_heads": None}, strategy="fsdp"),
        "layers.1.of_heads.weight differs between",
    ),
    "own columns x pipeline": (planned({"layers.*.of_heads": None}, pipeline=2), "of_heads.weight differs between"),
    "all columns x fsdp": (planned({"layers.*.norm": "sum_gradient"}, strategy="fsdp"), "norm.weight differs between"),
    "three in one x pipeline": (planned({}, "fused", pipeline=2), "out.weight differs between"),
}


@pytest.mark.drill
def test_a_wrong_plan_is_refused_in_products() -> None:
    found = in_world(4, small.refusals, [asked for asked, _ in WRONG_ON_FOUR.values()])
    for number, (name, (_, expected)) in enumerate(WRONG_ON_FOUR.items()):
        assert all(expected in said[number] for said in found), (name, [said[number] for said in found])


@pytest.fixture(scope="module")
def refusals() -> dict[str, list[str]]:
    """The errors of two ranks, separately."""
    found = in_world(2, small.refusals, [asked for asked, _ in REFUSED.values()])
    return {name: [said[number] for said in found] for number, name in enumerate(REFUSED)}


def _handed_over() -> str:
    import torch

    try:
        with lockstep.session(text(tensor=2), optimizer=lambda groups: torch.optim.Adam(groups)):
            return ""
    except lockstep.ConfigError as error:
        return str(error)


def test_an_optimizer_of_a_users_own_is_refused() -> None:
    assert all(gives(said, "optimizer", "parallel.tensor") for said in in_world(2, _handed_over))
