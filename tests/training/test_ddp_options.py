"""Each option of DDP on gloo: it works and the run is the single process's, or it is refused with the reason."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
from kit import small
from kit.failures import gives
from kit.runs import Trajectory, differences, recorded, recorded_all
from kit.worlds import in_world

import lockstep
from lockstep.loop.attempt import run_info
from lockstep.loop.session import components_of


def ddp(micro_size: int | str = "auto", model: str = "Net", **options: Any) -> dict[str, Any]:
    parallel = {"strategy": "ddp", "ddp": options}
    return small.config(model, batch={"global_size": 13, "micro_size": micro_size}, parallel=parallel)


@cache
def oracle() -> Trajectory:
    return recorded(small.config())


def test_options_that_change_nothing() -> None:
    options: list[dict[str, Any]] = [
        {"static_graph": True},
        {"static_graph": True, "micro_size": 4},
        {"gradient_as_bucket_view": False, "micro_size": 4},
        {"bucket_mb": 1e-5, "micro_size": 4},
        {"find_unused_parameters": True, "micro_size": 4},
    ]
    for chosen, run in zip(options, recorded_all([ddp(**chosen) for chosen in options], ranks=2), strict=True):
        assert differences(run, oracle()) == [], chosen


def test_compressed_gradients_come_close() -> None:
    configs = [
        ddp(compression="fp16"),
        ddp(compression="fp16", micro_size=4),
        ddp(compression="powersgd", powersgd={"rank": 2, "start_step": 2}),
    ]
    expected = recorded(small.config(), updates=8)
    for run, tolerance in zip(recorded_all(configs, ranks=2, updates=8), (1e-3, 1e-3, 0.1), strict=True):
        assert run.losses == pytest.approx(expected.losses, rel=tolerance)
        assert run.losses != expected.losses


def test_bf16_compression_is_refused_on_gloo() -> None:
    for message in in_world(2, small.refusal, ddp(compression="bf16")):
        assert message.startswith("parallel.ddp.compression: ")
        assert gives(message, "gloo", "fp16", "powersgd")


# --- parameters without a gradient ----------------------------------------------------------------------------------


def _with_spare(config: dict[str, Any]) -> tuple[list[float], Any, Any]:
    with lockstep.session(config) as session:
        before = small.weights(components_of(session).sharding.state.model)
        losses = [report.loss for report in session]
        return losses, before, small.weights(components_of(session).sharding.state.model)


@pytest.mark.parametrize("micro_size", ["auto", 4])
def test_unused_parameters_can_be_told(micro_size: int | str) -> None:
    config = ddp(micro_size, "WithSpare", find_unused_parameters=True)
    for losses, before, after in in_world(2, _with_spare, config):
        assert losses[-1] < losses[0]
        assert losses[:4] == pytest.approx(oracle().losses, rel=1e-6)
        assert (before["head.weight"] != after["head.weight"]).any()
        assert (before["spare.bias"] == after["spare.bias"]).all()


@pytest.mark.parametrize("micro_size", ["auto", 4])
@pytest.mark.parametrize("ranks", [1, 2])
def test_untold_unused_parameters_are_named_with_the_remedy(ranks: int, micro_size: int | str) -> None:
    config = small.config("WithSpare", batch={"global_size": 13, "micro_size": micro_size})
    for message in in_world(ranks, small.refusal, config):
        assert message.startswith("model: spare.weight, spare.bias: ")
        assert 'model.freeze: ["spare.weight", "spare.bias"]' in message
        assert "parallel.ddp.find_unused_parameters: true" in message


def test_a_frozen_layer_needs_no_gradient() -> None:
    config = ddp(model="WithSpare")
    config["model"] |= {"freeze": ["spare.*"]}
    for losses, _, _ in in_world(2, _with_spare, config):
        assert losses[:4] == pytest.approx(oracle().losses, rel=1e-6)


# --- strategies -----------------------------------------------------------------------------------------------------


def test_synchronised_batch_norm_needs_gpus() -> None:
    for message in in_world(2, small.refusal, ddp(model="WithBatchNorm", sync_batchnorm=True)):
        assert message.startswith("parallel.ddp.sync_batchnorm: ")


def test_batch_norm_is_said_to_depend_on_the_split() -> None:
    with lockstep.session(small.config("WithBatchNorm")) as session:
        notes = run_info(session, "run", "").notes
    assert any(gives(note, "(norm)", "batch.micro_size") for note in notes)


def test_dp_without_gpus_runs_as_single_and_says_so() -> None:
    with lockstep.session(small.config(parallel={"strategy": "dp"})) as session:
        assert any("runs as single" in note for note in run_info(session, "run", "").notes)
        losses = [report.loss for report in session]
    assert losses[:4] == pytest.approx(oracle().losses, rel=1e-6)


@pytest.mark.parametrize("strategy", ["single", "dp"])
def test_strategies_of_one_process_refuse_two_ranks(strategy: str) -> None:
    for message in in_world(2, small.refusal, small.config(parallel={"strategy": strategy})):
        assert message.startswith(f"parallel.strategy: {strategy}")
        assert gives(message, 1, "ddp")
