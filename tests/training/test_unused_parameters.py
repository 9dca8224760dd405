"""Layers that some samples leave out: a rank may have no gradient for what another has one for."""

from __future__ import annotations

import re
import time
from datetime import timedelta
from functools import cache
from typing import Any

import pytest
from kit import small
from kit.chains import TENSOR_PLAN
from kit.failures import gives
from kit.layouts import VARIANTS
from kit.runs import Trajectory, differences, recorded, recorded_all
from kit.small import config
from kit.worlds import in_world

import lockstep
from lockstep.config.loading import validate
from lockstep.core.errors import ConfigError
from lockstep.core.records import DataFacts, ParameterFacts
from lockstep.plan.mesh import Mesh
from lockstep.plan.plan import make_plan
from lockstep.plan.refusals import before_unused

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


# --- modules that only some ranks run -------------------------------------------------------------------------------

DIVIDED: dict[str, tuple[str, dict[str, Any]]] = {
    "skipped blocks": ("SkippedSteps", {}),
    "skipped blocks, gathered once": ("SkippedSteps", {"wrap": "root"}),
    "skipped blocks, grad op": ("SkippedSteps", {"sharding_strategy": "SHARD_GRAD_OP"}),
    "skipped blocks, prefetched": ("SkippedSteps", {"forward_prefetch": True}),
    "experts, gathered one by one": ("Mixtures", {"wrap": ["Mixture", "Step"]}),
    "experts, each micro-batch reduced": ("Mixtures", {"wrap": ["Step"], "reduce_every": "micro-batch"}),
    "no part divided": ("SkippedSteps", {"sharding_strategy": "NO_SHARD"}),
}


def skipping(model: str, micro_size: int, **parallel: Any) -> dict[str, Any]:
    return config(
        model,
        batch={"global_size": 12, "micro_size": micro_size},
        optim={"name": "sgd", "lr": 0.1, "weight_decay": 0.1, "decay": "all"},
        parallel={**parallel, "ddp": {"find_unused_parameters": True}},
    )


@cache
def alone(model: str) -> Trajectory:
    return recorded(skipping(model, 12, strategy="single"), updates=4)


@pytest.mark.parametrize("ranks", [2, 3])
def test_modules_that_some_ranks_leave_out(ranks: int) -> None:
    asked = {
        f"{name}, {accumulation} micro-batches": skipping(
            model, 12 // ranks // accumulation, strategy="fsdp", fsdp=options
        )
        for name, (model, options) in DIVIDED.items()
        for accumulation in (1, 2)
        if accumulation == 2 or (ranks == 2 and not options)
        if ranks == 2 or not options.keys() & {"sharding_strategy", "forward_prefetch"}
    }
    for name, run in zip(asked, recorded_all(list(asked.values()), ranks, 4), strict=True):
        oracle = alone(DIVIDED[name.rpartition(",")[0]][0])
        assert differences(run, oracle) == [], name
        assert [sorted(found) for found in run.gradients] == [sorted(found) for found in oracle.gradients], name


@pytest.mark.drill
def test_modules_left_out_where_activations_are_computed_again() -> None:
    asked = skipping("Mixtures", 3, strategy="fsdp", fsdp={"wrap": ["Mixture", "Step"]})
    asked["memory"] = {"activation_checkpointing": {"mode": "full"}}
    assert differences(recorded(asked, 2, 4), alone("Mixtures")) == []


def selective(**fsdp: Any) -> dict[str, Any]:
    asked = skipping("Mixtures", 3, strategy="fsdp", fsdp=fsdp)
    return {**asked, "memory": {"activation_checkpointing": {"mode": "selective"}}}


def test_selective_checkpointing_around_units_is_refused() -> None:
    """torch's fails in the backward, since FSDP's own operations are repeated in another number."""
    with pytest.raises(ConfigError) as refused, lockstep.session(selective(wrap=["Step"])):
        pass
    assert refused.value.problems[0].key == "memory.activation_checkpointing.mode"
    assert "blocks.0.experts.0" in str(refused.value)


@pytest.mark.drill
def test_selective_checkpointing_with_units_that_are_gathered_once() -> None:
    advised = [selective(wrap=["Step"], sharding_strategy="SHARD_GRAD_OP"), selective(wrap="blocks")]
    for run in recorded_all(advised, 2, 4):
        assert differences(run, alone("Mixtures")) == []


@pytest.mark.drill
def test_modules_left_out_by_replicas_of_a_divided_model() -> None:
    hybrid = skipping("SkippedSteps", 2, strategy="fsdp", data=2, fsdp={"sharding_strategy": "HYBRID_SHARD"})
    assert differences(recorded(hybrid, 4, 4), alone("SkippedSteps")) == []


@pytest.mark.parametrize("micro_size", [6, 3])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_that_leaves_a_module_out_in_a_later_update_is_named(strategy: str, micro_size: int) -> None:
    """Also where, with accumulation, the parameter has a gradient from the micro-batch before."""
    began = time.monotonic()
    asked = leaving([1], [0, 2], micro_size, strategy)
    told = in_world(2, refusal, asked)
    assert time.monotonic() - began < 30
    assert "find_unused_parameters: true" in told[1] or "write true" in told[1].lower()
    assert "rank 1" in told[1]
    assert "steps.1" in told[1]


def leaving(ranks: list[int], steps: list[int], micro_size: int, strategy: str) -> dict[str, Any]:
    found = config(batch={"global_size": 12, "micro_size": micro_size}, parallel={"strategy": strategy})
    found["model"] |= {"target": "kit.small:ChangesCourse", "arguments": {"ranks": ranks, "steps": steps}}
    return found


def refusal(asked: dict[str, Any]) -> str:
    """Of the first four updates, by a rank that doesn't wait long for others to do as it does."""
    from lockstep.sharding import collective_order

    collective_order._OTHERS_WAIT = timedelta(seconds=1)
    return small.refusal(asked, 4)


def test_another_order_is_refused_on_one_rank_and_taken_from_all() -> None:
    """Blocks are of one size: gathered in another order they would be taken for each other, and nothing would hang."""
    swapped = in_world(2, refusal, leaving([1], [0, 2, 1], 6, "fsdp"))
    assert gives(swapped[1], "rank 1", "steps.2", "steps.1")
    assert in_world(2, refusal, leaving([0, 1], [0, 2, 1], 6, "fsdp")) == ["", ""]


def test_ranks_that_differ_from_the_first_on_are_both_told() -> None:
    asked = skipping("SkippedSteps", 6, strategy="fsdp")
    asked["parallel"]["ddp"] = {}
    for message in in_world(2, small.refusal, asked):
        assert message.startswith("parallel.ddp.find_unused_parameters: false, ")


# --- ZeRO -----------------------------------------------------------------------------------------------------------

GATHERED: dict[str, Any] = {"config": {"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}}
ZERO: dict[str, dict[str, Any]] = {
    "zero 1": {"zero_stage": 1},
    "zero 2": {"zero_stage": 2},
    "zero 2, bucket by bucket": {
        "zero_stage": 2,
        "config": {"zero_optimization": {"stage": 2, "reduce_bucket_size": 20, "overlap_comm": True}},
    },
    "zero 3, nothing gathered": {"zero_stage": 3},
    "zero 3": {"zero_stage": 3, **GATHERED},
}


def under_zero(asked: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    return {**asked, "parallel": {"strategy": "deepspeed", "deepspeed": options}}


def test_ranks_of_zero_that_differ_from_the_first_on_are_both_told() -> None:
    asked = [under_zero(skipping("SkippedSteps", 6), options) for options in ZERO.values()]
    for messages in in_world(2, small.refusals, asked):
        for message in messages:
            assert message.startswith("parallel.ddp.find_unused_parameters: false, ")
            assert re.search(r"rank 0 .* steps.* rank 1 .* steps.*parallel.strategy: ddp", message)


@pytest.mark.parametrize(
    ("name", "steps"),
    [("zero 1", [0, 2]), ("zero 2, bucket by bucket", [0, 2]), ("zero 2", [0, 2, 1]), ("zero 3", [0, 2])],
)
def test_a_rank_of_zero_that_does_otherwise_in_a_later_update_is_named(name: str, steps: list[int]) -> None:
    """Also where gradients of one parameter would be added to those of another of its shape, and nothing would hang."""
    began = time.monotonic()
    told = in_world(2, refusal, under_zero(leaving([1], steps, 3, "deepspeed"), ZERO[name]))
    assert time.monotonic() - began < 30
    assert re.search(r"rank 1 .* it .* steps\.[12]", told[1])


def test_what_all_ranks_of_zero_leave_out_in_a_later_update_is_no_fault() -> None:
    asked = [under_zero(leaving([0, 1], [0, 2], 3, "deepspeed"), options) for options in ZERO.values()]
    assert in_world(2, small.refusals, asked) == [[""] * len(ZERO)] * 2


# --- the remedy -----------------------------------------------------------------------------------------------------

REMEDIES: dict[str, tuple[dict[str, Any], str]] = {
    "tensor": ({"strategy": "ddp", "tensor": 2}, "leave parallel.tensor out and set "),
    "tensor x fsdp": ({"strategy": "fsdp", "tensor": 2}, "leave parallel.tensor out and set "),
    "zero1": ({"strategy": "deepspeed", "deepspeed": {"zero_stage": 1}}, "take parallel.strategy: ddp and set "),
}


def with_spare(parallel: dict[str, Any]) -> dict[str, Any]:
    found = config("Net", batch={"global_size": 4, "micro_size": 1}, parallel=parallel)
    return {**found, "model": {**found["model"], "target": "kit.chains:Spare"}}


def followed(parallel: dict[str, Any], message: str) -> dict[str, Any]:
    """The section once the message's advice is taken."""
    left_out = re.findall(r"parallel\.(\w+)", (re.findall(r"leave ([^,]*) out and", message) or [""])[0])
    taken = re.search(r"take parallel\.strategy: (\w+)", message)
    kept = {"strategy": taken[1]} if taken else parallel
    return {key: value for key, value in kept.items() if key not in left_out} | {
        "ddp": {"find_unused_parameters": True}
    }


def test_the_advice_is_accepted_where_it_is_given() -> None:
    plans = {"tensor_parallel": {"plan": TENSOR_PLAN}}
    asked = [with_spare({**parallel, **(plans if "tensor" in parallel else {})}) for parallel, _ in REMEDIES.values()]
    for messages in in_world(2, small.refusals, asked):
        for message, (parallel, advice) in zip(messages, REMEDIES.values(), strict=True):
            assert message.startswith("model: ")
            assert advice in message
            advised = validate(with_spare(followed(parallel, message)))
            make_plan(advised.config, 2, DataFacts(40, None), [ParameterFacts("weight", (4, 4), 4, True)])


def test_the_advice_names_what_the_run_has() -> None:
    assert before_unused("fsdp", Mesh(shard=2)) == before_unused("ddp", Mesh(data=2, context=2)) == ""
    assert before_unused("ddp", Mesh(pipeline=2)) == "leave parallel.pipeline out and "
    assert before_unused("ddp", Mesh(pipeline=2, tensor=2)) == "leave parallel.pipeline and parallel.tensor out and "
