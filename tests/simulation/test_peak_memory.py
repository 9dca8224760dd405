"""Peak memory: predicted on the simulated device, and measured on the CPU.

The prediction runs the same code without data, so the bytes of each category are equal, not close.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch
from kit import small
from kit.layouts import variant_of

import lockstep
from lockstep.assembly.planning import data_facts
from lockstep.assembly.user_objects import UserObjects
from lockstep.cli.main import main
from lockstep.config.schema import Config
from lockstep.core.errors import ConfigError
from lockstep.models.build import parameter_facts, sketch_model
from lockstep.plan.choosing import USABLE
from lockstep.simulation.estimate import Estimator, estimator_of, under
from lockstep.simulation.failing import Unpredictable
from lockstep.simulation.memory import MemoryLedger, Peak, Watched, resizes_seen
from lockstep.simulation.planning import describe_memory
from lockstep.simulation.updates import peak_of_rank, run_updates
from lockstep.training.job import opened

NOTHING = UserObjects()
UPDATES = 3
SLACK = 1024
"""Bytes of counters that a real run has as numbers of Python."""
FEATURES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"precision": {"compute": "bf16"}},
    "checkpointing": {"memory": {"activation_checkpointing": {"mode": "full"}}},
    "loss in chunks": {"memory": {"loss_chunk": 16}},
    "one micro-batch": {"optim": {"name": "lion", "lr": 0.1}, "batch": {"global_size": 4, "micro_size": 4}},
}


def decoder(**sections: Any) -> Config:
    """Return a decoder of two blocks on text that every machine has."""
    return Config.model_validate(
        {
            "model": {"kind": "transformer", "vocabulary": 256, "layers": 2, "heads": 2, "width": 64},
            "data": {"train": {"kind": "stdlib-text", "length": 64}},
            "batch": {"global_size": 8, "micro_size": 4},
            "optim": {"name": "adamw", "lr": 1e-3},
            "precision": {"compute": "fp32"},
            "launch": {"device": "cpu"},
            "run": {"steps": UPDATES},
            "parallel": {"strategy": "single"},
            **sections,
        }
    )


def measured(config: Config) -> Peak:
    ledger = MemoryLedger("cpu")
    with opened(config, NOTHING) as session, Watched(ledger), resizes_seen(ledger):
        run_updates(session, ledger, UPDATES)
    return ledger.peak()


def estimator(config: Config, ranks: int, memory: int | None = None) -> Estimator:
    facts = data_facts(config, NOTHING)
    return Estimator(config, ranks, facts, parameter_facts(sketch_model(config.model, facts)), NOTHING, memory)


@pytest.mark.parametrize("feature", FEATURES)
def test_the_prediction_equals_the_measurement_by_category(feature: str) -> None:
    config = decoder(**FEATURES[feature])
    predicted, actual = peak_of_rank(config, 1, 0, NOTHING, UPDATES, "cpu"), measured(config)
    for category, size in actual.by_category.items():
        assert abs(predicted.by_category[category] - size) <= SLACK, category
    assert actual.by_category["activations"] > 50_000
    assert actual.by_category["optimizer"] > 0


def test_shards_and_replicas_hold_what_they_should() -> None:
    config = decoder(parallel={"strategy": "fsdp"}, launch={"device": "auto"}, precision={"compute": "bf16"})
    elements = sum(fact.elements for fact in estimator(config, 4).parameters)
    sharded, whole = (estimator(config, 4).peak(under(config, *variant_of(name))) for name in ("fsdp", "ddp"))
    assert sharded.by_category["parameters"] == pytest.approx(elements, rel=0.02)  # four bytes, over four ranks
    assert whole.by_category["parameters"] == pytest.approx(4 * elements, rel=0.02)
    assert sharded.by_category["optimizer"] == pytest.approx(2 * elements, rel=0.02)


@pytest.mark.parametrize("name", ["fsdp", "fsdp-grad-op", "zero3", "ddp"])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_what_a_rank_keeps_whole_is_at_most_its_peak(name: str, accumulated: int) -> None:
    """So a strategy that `too_large` leaves out would not fit."""
    wide = {"kind": "transformer", "vocabulary": 256, "layers": 4, "heads": 4, "width": 256}
    batch = {"global_size": 8 * accumulated, "micro_size": 1}
    own = estimator(under(decoder(model=wide, batch=batch, precision={"compute": "bf16"}), *variant_of(name)), 8)
    peak, elements = own.peak(own.config).bytes, sum(fact.elements for fact in own.parameters)
    assert not replace(own, memory=peak).too_large(own.config)
    sharded = 2 * elements  # parameters, gradients and two moments in fp32, over eight ranks
    whole = {"fsdp": 4 * elements * (accumulated > 1), "fsdp-grad-op": 2 * elements, "ddp": 14 * elements}
    assert replace(own, memory=sharded + whole.get(name, 0) - elements // 2 - 1).too_large(own.config)


def test_ddp_holds_the_gradients_of_several_micro_batches_once() -> None:
    """torch's DDP alone holds them twice until the last micro-batch: in its buckets and as they are accumulated."""
    wide = {"kind": "transformer", "vocabulary": 256, "layers": 4, "heads": 4, "width": 256}
    config = decoder(model=wide, batch={"global_size": 16, "micro_size": 2}, parallel={"strategy": "ddp"})
    elements = sum(fact.elements for fact in estimator(config, 4).parameters)
    held = estimator(config, 4).peak(config).by_category["gradients"]
    assert 4 * elements <= held < 5 * elements


def test_fsdp_keeps_no_casts_of_weights() -> None:
    """Casts of weights, which autograd keeps until the backward, hold two bytes for each parameter on every rank."""
    config = decoder(parallel={"strategy": "fsdp"}, launch={"device": "auto"}, precision={"compute": "bf16"})
    elements = sum(fact.elements for fact in estimator(config, 4).parameters)
    assert estimator(config, 4).peak(config).by_category["casts"] < 2 * elements / 4


def test_what_does_not_fit_names_the_smallest_change() -> None:
    config = decoder(batch={"global_size": 8, "micro_size": 8}, launch={"device": "auto"})
    needed = estimator(config, 1).peak(config).bytes
    row = next(iter(estimator(config, 1, needed // 2).estimates()))
    assert row.fits is False
    assert row.note in ("it fits with batch.micro_size: 4", "it fits with batch.micro_size: 2")
    assert next(iter(estimator(config, 1, int(needed / 0.9) + 1).estimates())).fits is True
    tight = next(iter(estimator(config, 1, needed).estimates()))
    assert tight.fits is False, "a tenth is left for what an allocator adds"
    assert "  tight  <-\ntight: over nine tenths of" in describe_memory([tight], needed)


def test_gradients_that_wait_whole_for_the_last_micro_batch_are_the_first_change() -> None:
    """Under fsdp, an update of several micro-batches holds all gradients unless each micro-batch reduces them."""
    wide = {"kind": "transformer", "vocabulary": 256, "layers": 4, "heads": 4, "width": 256}
    config = decoder(model=wide, batch={"global_size": 16, "micro_size": 2}, parallel={"strategy": "fsdp"})
    needed = estimator(config, 4).peak(config)
    limit = int((needed.bytes - needed.by_category["gradients"] // 2) / 0.9)
    row = next(iter(estimator(config, 4, limit).estimates()))
    assert row.note == "it fits with parallel.fsdp.reduce_every: micro-batch"


@pytest.mark.parametrize("refusal", [ConfigError("refused"), Unpredictable("can't be simulated")])
def test_a_change_that_is_refused_is_not_part_of_those_after_it(
    refusal: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def peak(estimator: Estimator, config: Config) -> Peak:
        if config.memory.activation_checkpointing.mode == "full":
            raise refusal
        return Peak(50 if config.parallel.strategy == "fsdp" else 100, {})

    monkeypatch.setattr(Estimator, "peak", peak)
    config = decoder(launch={"device": "auto"}, parallel={"strategy": "ddp"}, batch={"global_size": 4})
    note = estimator(config, 4, 60).remedy(config)
    assert note == "it fits with parallel.strategy: fsdp"


def test_a_change_that_is_not_needed_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """With checkpointing it still doesn't fit; with fsdp it does, also without checkpointing."""
    sizes = {("ddp", "none"): 100, ("ddp", "full"): 90, ("fsdp", "none"): 50, ("fsdp", "full"): 40}

    def peak(estimator: Estimator, config: Config) -> Peak:
        return Peak(sizes[str(config.parallel.strategy), config.memory.activation_checkpointing.mode], {})

    monkeypatch.setattr(Estimator, "peak", peak)
    config = decoder(launch={"device": "auto"}, parallel={"strategy": "ddp"}, batch={"global_size": 4})
    assert estimator(config, 4, 60).remedy(config) == "it fits with parallel.strategy: fsdp"
    assert estimator(config, 4, 50).remedy(config) == (
        "it fits with memory.activation_checkpointing.mode: full and parallel.strategy: fsdp"
    )


def test_an_activation_in_several_kernels_is_the_first_change() -> None:
    """What is between them is kept for the backward."""
    architecture = {"model_type": "gpt2", "n_layer": 2, "n_embd": 64, "n_head": 2, "vocab_size": 256}
    model = {"kind": "huggingface", "task": "causal-lm", "architecture": architecture}
    config = decoder(model=model, batch={"global_size": 8, "micro_size": 8})
    own = estimator_of(config, 1, None, NOTHING)
    needed = own.peak(config).bytes
    row = next(iter(replace(own, memory=int(0.96 * needed / USABLE)).estimates("planned")))
    assert row.note == "it fits with model.architecture.activation_function: gelu_pytorch_tanh"
    assert "activation_function: gelu_pytorch_tanh" in next(iter(own.estimates("planned"))).note
    fused = {**architecture, "activation_function": "gelu_pytorch_tanh"}
    assert not estimator_of(decoder(model={**model, "architecture": fused}), 1, None, NOTHING).fused


def test_parameters_in_bf16_are_the_last_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def peak(estimator: Estimator, config: Config) -> Peak:
        return Peak(50 if config.parallel.fsdp.mixed_precision.param_dtype == "bf16" else 100, {})

    monkeypatch.setattr(Estimator, "peak", peak)
    config = decoder(launch={"device": "auto"}, parallel={"strategy": "fsdp"}, precision={"compute": "bf16"})
    assert "param_dtype: bf16" in estimator(config, 4, 60).remedy(config)
    assert "param_dtype" not in estimator(config, 4, 60).remedy(config.with_values(precision={"compute": "fp32"}))


def test_a_module_of_the_user_is_left_as_it_is() -> None:
    model = small.Net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rows = lockstep.estimate_memory(
        {
            "objective": {"kind": "classification"},
            "batch": {"global_size": 16},
            "optim": {"name": "adamw", "lr": 0.1},
            "run": {"steps": 3},
        },
        ranks=4,
        memory=1 << 30,
        model=model,
        train_dataset=small.points(),
    )
    assert {row.name for row in rows} >= {"ddp", "fsdp"}
    assert all(row.fits for row in rows if row.peak is not None)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


def test_a_language_model_needs_no_dataset() -> None:
    sizes = {"kind": "transformer", "vocabulary": 64, "layers": 1, "width": 16, "heads": 2}
    config = {"model": sizes, "batch": {"global_size": 8, "micro_size": 4}, "run": {"steps": 1}}
    peaks = []
    for length in (16, 32):
        row = next(row for row in lockstep.estimate_memory(config, ranks=2, length=length) if row.planned)
        assert row.peak is not None, row.note
        peaks.append(row.peak.by_category["activations"])
    assert peaks[1] >= 1.5 * peaks[0]
    with pytest.raises(lockstep.ConfigError, match="train_dataset="):
        lockstep.estimate_memory({"run": {"steps": 1}}, model=small.Net(), length=16)


def test_plan_shows_the_peak(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "stdlib-lm", "--ranks", "4", "--memory", "80GiB", "--peak", "planned", "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)["strategies"]
    assert row["name"] == "ddp"
    assert row["fits"] is True
    assert row["peak_bytes"] == sum(size for name, size in row.items() if name.endswith("_bytes")) // 2
