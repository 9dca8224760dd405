"""The runs of a verification are planned before any process exists."""

from __future__ import annotations

from typing import Any

from kit.failures import gives
from kit.proofs import text

from lockstep.config.loading import validate
from lockstep.proof.cases import VerificationPlan, plan_verification
from lockstep.proof.rows import Row, explanations


def planned(strategies: list[str], ranks: list[int], gpus: int = 0, **sections: Any) -> VerificationPlan:
    precision = sections.pop("precision_of_runs", "fp32")
    return plan_verification(validate(text(**sections)).config, strategies, ranks, precision, gpus)


def test_each_strategy_runs_as_configured_accumulated_and_under_sgd() -> None:
    plan = planned(["ddp"], [2])
    assert [(case.optimizer, case.accumulation, case.config.batch.micro_size) for case in plan.cases] == [
        ("adamw", 1, 7), ("adamw", 2, 4), ("sgd", 2, 4)
    ]  # fmt: skip
    assert set(plan.references) == {"adamw", "sgd"}
    assert all(reference.parallel.strategy == "single" for reference in plan.references.values())


def test_no_run_is_repeated_if_the_config_accumulates_or_uses_sgd() -> None:
    accumulated = planned(["ddp"], [2], batch={"global_size": 13, "micro_size": 2})
    assert [(case.optimizer, case.accumulation) for case in accumulated.cases] == [("adamw", 4), ("sgd", 4)]
    sgd = planned(["ddp"], [2], optim={"name": "sgd"})
    assert [(case.optimizer, case.accumulation) for case in sgd.cases] == [("sgd", 1), ("sgd", 2)]
    assert set(sgd.references) == {"sgd"}


def test_single_is_compared_with_itself_only_with_other_micro_batches() -> None:
    plan = planned(["single"], [1, 2])
    assert [(case.ranks, case.accumulation) for case in plan.cases] == [(1, 2), (1, 2)]
    (left_out,) = plan.left_out
    assert left_out.startswith("single on 2 ranks: ")


def test_combinations_without_meaning_are_left_out_with_the_reason() -> None:
    plan = planned(["dp", "fsdp-hybrid"], [1, 2, 3])
    assert {(case.strategy, case.ranks) for case in plan.cases} == {("fsdp-hybrid", 2)}
    assert plan.left_out == (
        "dp on 1 rank, dp on 2 ranks, dp on 3 ranks: dp is one process with two or more GPUs, 0 available",
        "fsdp-hybrid on 1 rank, fsdp-hybrid on 3 ranks: two sharded replicas need an even number of ranks",
    )
    with_gpus = planned(["dp"], [1, 2], gpus=2)
    assert {(case.strategy, case.ranks) for case in with_gpus.cases} == {("dp", 1)}


def test_each_strategy_and_number_of_ranks_sets_its_own_degrees() -> None:
    plan = planned(["fsdp", "fsdp-hybrid"], [4], parallel={"strategy": "ddp", "data": 8})
    degrees = {(case.strategy, case.config.parallel.data, case.config.parallel.shard) for case in plan.cases}
    assert degrees == {("fsdp", "auto", "auto"), ("fsdp-hybrid", 2, "auto")}


def test_a_partition_of_the_config_that_no_run_has_is_noted() -> None:
    fact = "no run has parallel.pipeline 2, which the config sets"
    pipeline = {"pipeline": 2}
    assert gives(planned(["ddp"], [2], parallel=pipeline).not_covered or "", fact, "--strategies pipeline-1f1b")
    assert planned(["ddp", "pipeline-1f1b"], [2], parallel=pipeline).not_covered is None
    assert planned(["ddp", "pipeline-1f1b"], [1], parallel=pipeline).not_covered == fact
    fsdp = {**pipeline, "strategy": "fsdp"}
    assert gives(planned(["ddp"], [2], parallel=fsdp).not_covered or "", fact, "--strategies pipeline-1f1b+fsdp")
    assert planned(["ddp"], [2], parallel={"strategy": "fsdp", "shard": 2}).not_covered is None


def test_options_that_differ_by_design_are_changed_with_a_note() -> None:
    mixed = {"strategy": "fsdp", "fsdp": {"mixed_precision": {"param_dtype": "bf16"}, "forward_prefetch": True}}
    plan = planned(["fsdp"], [2], parallel=mixed, precision={"compute": "bf16"})
    options = plan.cases[0].config.parallel.fsdp
    assert options.mixed_precision.param_dtype is None
    assert options.forward_prefetch
    assert plan.cases[0].config.precision.compute == "fp32"
    assert len(plan.notes) == 2
    kept = planned(["fsdp"], [2], parallel=mixed, precision_of_runs="bf16")
    assert kept.cases[0].config.parallel.fsdp.mixed_precision.param_dtype == "bf16"


def test_refusals_are_known_before_ranks_start() -> None:
    plan = planned(["zero2", "fsdp"], [2], optim={"name": "adafactor"})
    assert {(refused.case.strategy, refused.case.optimizer) for refused in plan.refused} == {("zero2", "adafactor")}
    assert ("zero2", "sgd") in {(case.strategy, case.optimizer) for case in plan.cases}
    numbers = [case.number for case in plan.cases] + [refused.case.number for refused in plan.refused]
    assert sorted(numbers) == list(range(len(numbers)))


def test_bf16_parameters_are_refused_where_they_are_and_compared_in_fp32_elsewhere() -> None:
    plan = planned(["ddp", "zero2"], [2], precision={"parameters": "bf16"})
    assert {refused.case.strategy for refused in plan.refused} == {"zero2"}
    assert {case.strategy for case in plan.cases} == {"ddp"}
    configs = [*(case.config for case in plan.cases), *plan.references.values()]
    assert {config.precision.parameters for config in configs} == {"fp32"}
    assert any("precision.parameters" in note for note in plan.notes)


def test_a_reference_is_computed_in_each_update() -> None:
    plan = planned(["ddp"], [2], objective={"kind": "dpo", "precompute": True})
    assert {case.config.objective.precompute for case in plan.cases} == {False}
    assert any("objective.precompute" in note for note in plan.notes)


def test_each_reason_of_refused_runs_is_printed_once() -> None:
    def row(strategy: str, ranks: int, accumulation: int, optimizer: str, reason: str | None) -> Row:
        status = "refused" if reason else "passed"
        return Row(strategy, ranks, optimizer, accumulation, status, None if reason else True, reason=reason)

    rows = [
        *(row("ddp", ranks, micro, name, "odd") for ranks in (1, 3) for micro, name in ((1, "adamw"), (2, "sgd"))),
        *(row("fsdp", ranks, 1, name, "odd") for ranks in (1, 3) for name in ("adamw", "sgd")),
        row("zero1", 2, 1, "adamw", None),
        row("zero1", 2, 2, "adamw", "one sample"),
        row("zero1", 2, 2, "sgd", "one sample"),
        row("zero2", 2, 2, "adamw", "one sample"),
        row("zero2", 2, 2, "sgd", None),
    ]
    assert explanations(rows) == [
        "ddp on 1 rank, ddp on 3 ranks, fsdp on 1 rank, fsdp on 3 ranks: refused: odd",
        "zero1 on 2 ranks, zero2 on 2 ranks: refused: one sample",
    ]
