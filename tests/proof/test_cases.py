"""Which runs a proof is made of: arithmetic, before any process exists."""

from __future__ import annotations

from typing import Any

from kit.proofs import text

from lockstep.config.loading import validate
from lockstep.proof.cases import Proof, plan_proof


def planned(strategies: list[str], ranks: list[int], gpus: int = 0, **sections: Any) -> Proof:
    precision = sections.pop("proof_in", "fp32")
    return plan_proof(validate(text(**sections)).config, strategies, ranks, precision, gpus)


def test_each_strategy_runs_as_asked_accumulated_and_under_sgd() -> None:
    proof = planned(["ddp"], [2])
    assert [(case.optimizer, case.accumulation, case.config.batch.micro_size) for case in proof.cases] == [
        ("adamw", 1, 7), ("adamw", 2, 4), ("sgd", 2, 4)
    ]  # fmt: skip
    assert set(proof.references) == {"adamw", "sgd"}
    assert all(reference.parallel.strategy == "single" for reference in proof.references.values())


def test_what_accumulates_already_or_is_sgd_is_not_run_twice() -> None:
    accumulated = planned(["ddp"], [2], batch={"global_size": 13, "micro_size": 2})
    assert [(case.optimizer, case.accumulation) for case in accumulated.cases] == [("adamw", 4), ("sgd", 4)]
    sgd = planned(["ddp"], [2], optim={"name": "sgd"})
    assert [(case.optimizer, case.accumulation) for case in sgd.cases] == [("sgd", 1), ("sgd", 2)]
    assert set(sgd.references) == {"sgd"}


def test_single_is_compared_with_itself_only_where_it_is_cut_otherwise() -> None:
    proof = planned(["single"], [1, 2])
    assert [(case.ranks, case.accumulation) for case in proof.cases] == [(1, 2), (1, 2)]
    assert proof.left_out == ("single on 2 ranks: single is one process, which all others are compared with",)


def test_what_makes_no_sense_is_left_out_with_the_reason() -> None:
    proof = planned(["dp", "fsdp-hybrid"], [1, 2, 3])
    assert {(case.strategy, case.ranks) for case in proof.cases} == {("fsdp-hybrid", 2)}
    assert len(proof.left_out) == 5
    with_gpus = planned(["dp"], [1, 2], gpus=2)
    assert {(case.strategy, case.ranks) for case in with_gpus.cases} == {("dp", 1)}


def test_degrees_are_those_of_the_strategy_and_its_ranks() -> None:
    proof = planned(["fsdp", "fsdp-hybrid"], [4], parallel={"strategy": "ddp", "data": 8})
    degrees = {(case.strategy, case.config.parallel.data, case.config.parallel.shard) for case in proof.cases}
    assert degrees == {("fsdp", "auto", "auto"), ("fsdp-hybrid", 2, "auto")}


def test_what_the_config_asks_for_and_no_run_is() -> None:
    asked = "parallel.pipeline 2, which the config asks for, is not among them"
    pipeline = {"pipeline": 2}
    assert planned(["ddp"], [2], parallel=pipeline).missing == f"{asked}: --strategies pipeline-1f1b"
    assert planned(["ddp", "pipeline-1f1b"], [2], parallel=pipeline).missing is None
    assert planned(["ddp", "pipeline-1f1b"], [1], parallel=pipeline).missing == asked
    fsdp = {**pipeline, "strategy": "fsdp"}
    assert planned(["ddp"], [2], parallel=fsdp).missing == f"{asked}: --strategies pipeline-1f1b+fsdp"
    no_name = {**fsdp, "tensor": 2}
    assert planned(["ddp"], [2], parallel=no_name).missing == (
        "parallel.pipeline 2 with parallel.tensor 2, which the config asks for, is not among them: the nearest is "
        "--strategies pipeline-1f1b+fsdp"
    )
    assert planned(["ddp"], [2], parallel={"strategy": "fsdp", "shard": 2}).missing is None


def test_what_would_differ_by_design_is_taken_out_and_said() -> None:
    mixed = {"strategy": "fsdp", "fsdp": {"mixed_precision": {"param_dtype": "bf16"}, "forward_prefetch": True}}
    proof = planned(["fsdp"], [2], parallel=mixed, precision={"compute": "bf16"})
    options = proof.cases[0].config.parallel.fsdp
    assert options.mixed_precision.param_dtype is None
    assert options.forward_prefetch
    assert proof.cases[0].config.precision.compute == "fp32"
    assert len(proof.notes) == 2
    kept = planned(["fsdp"], [2], parallel=mixed, proof_in="bf16")
    assert kept.cases[0].config.parallel.fsdp.mixed_precision.param_dtype == "bf16"


def test_arithmetic_refuses_before_ranks_are_started() -> None:
    proof = planned(["fsdp", "ddp"], [2], optim={"name": "adafactor"})
    assert {(one.case.strategy, one.case.optimizer) for one in proof.refused} == {("fsdp", "adafactor")}
    assert ("fsdp", "sgd") in {(case.strategy, case.optimizer) for case in proof.cases}
    numbers = [case.number for case in proof.cases] + [one.case.number for one in proof.refused]
    assert sorted(numbers) == list(range(len(numbers)))
