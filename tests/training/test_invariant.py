"""`run.determinism: invariant`: bitwise identical on any number of ranks, by a comparison that can fail."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from kit import small
from kit.runs import Trajectory, record_all, recorded_all
from kit.worlds import in_world

import lockstep
from lockstep.checkpoint.local import LocalStorage
from lockstep.resuming.checkpoints import Checkpoints
from lockstep.resuming.resuming import Resume

UPDATES = 5  # of 13 or 16 among 40 samples: a smaller one ends the epoch
ADAMW = {"name": "adamw", "lr": 1e-3, "clip_norm": 0.5}
SGD = {"name": "sgd", "lr": 0.1, "momentum": 0.9, "clip_norm": 0.5}


def text(determinism: str = "invariant", dropout: float = 0.1, **sections: Any) -> dict[str, Any]:
    """A small transformer on ragged text: 7 micro-batches, the last one smaller."""
    ragged = {"kind": "custom", "target": "kit.ragged:Ragged", "collate": "kit.ragged:collate"}
    model = {"kind": "transformer", "layers": 1, "width": 32, "heads": 4, "vocabulary": 64, "dropout": dropout}
    return {
        "model": model,
        "data": {"train": ragged},
        "batch": {"global_size": 13, "micro_size": 2},
        "optim": ADAMW,
        "precision": {"compute": "fp32"},
        "run": {"steps": 8, "determinism": determinism},
        **sections,
    }


def points(**sections: Any) -> dict[str, Any]:
    batch = {"global_size": 13, "micro_size": 2}
    return {**small.config(), "batch": batch, "run": {"steps": 8, "determinism": "invariant"}, **sections}


def digits(**sections: Any) -> dict[str, Any]:
    return {
        "model": {"kind": "image-classifier", "layers": 1, "width": 4, "dropout": 0.1},
        "data": {"train": {"kind": "digits", "shift": 2}},
        "batch": {"global_size": 20, "micro_size": 3},
        "optim": ADAMW,
        "precision": {"compute": "fp32"},
        "run": {"steps": 8, "determinism": "invariant"},
        **sections,
    }


DDP = {"strategy": "ddp"}
UNUSED = {"ddp": {"find_unused_parameters": True}}
JITTERED = {"train": {"kind": "custom", "target": "kit.drawing:Jittered"}}
SOMETIMES = {"kind": "custom", "target": "kit.drawing:Sometimes"}
CONFIGS = {
    "ragged text, AdamW": text(),
    "ragged text, SGD, in slices": text(optim=SGD, parallel={"ddp": {"bucket_mb": 0.01}}),
    "ragged text, bf16": text(precision={"compute": "bf16"}),
    "ragged text, a power of two": text(batch={"global_size": 16, "micro_size": 4}, parallel=DDP),
    "fewer micro-batches than ranks": text(batch={"global_size": 3, "micro_size": 2}),
    "digits, shifted": digits(),
    "digits, fp16 that overflows": digits(
        precision={"compute": "fp16", "loss_scale": {"initial": 2.0**22, "growth_interval": 2}}, optim=SGD
    ),
    "points, moved by a user's code": points(data=JITTERED),
    "points, a data worker": points(data={**JITTERED, "loader": {"workers": 1}}),
    "a layer used now and then": points(model=SOMETIMES, parallel=UNUSED, data=JITTERED),
    "muon": text(optim={"name": "muon", "lr": 0.01}),
}


@cache
def runs(ranks: int) -> dict[str, Trajectory]:
    return dict(zip(CONFIGS, recorded_all(list(CONFIGS.values()), ranks, UPDATES), strict=True))


def other_bits(run: Trajectory, oracle: Trajectory) -> list[str]:
    """Return what isn't bitwise identical."""
    told = ("losses", "norms", "samples", "counts")  # NaN, of an overflow, is equal to itself here
    found = [what for what in told if repr(getattr(run, what)) != repr(getattr(oracle, what))]
    for update, (mine, theirs) in enumerate(zip(run.gradients, oracle.gradients, strict=True)):
        assert mine.keys() == theirs.keys()
        found += [f"gradient {update}: {name}" for name in mine if mine[name].tobytes() != theirs[name].tobytes()]
    return found + [name for name in oracle.weights if run.weights[name].tobytes() != oracle.weights[name].tobytes()]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("name", CONFIGS)
def test_any_number_of_ranks_gives_the_same_bits(name: str, ranks: int) -> None:
    alone = runs(1)[name]
    assert other_bits(runs(ranks)[name], alone) == []
    assert len(alone.losses) == UPDATES
    assert len(set(alone.losses)) == UPDATES, "it learns nothing"


def test_a_layer_that_no_batch_used_has_no_gradient() -> None:
    there = [set(gradients) for gradients in runs(1)["a layer used now and then"].gradients]
    assert all("never.weight" not in names for names in there)
    assert {"seldom.weight" in names for names in there} <= {True, False}


@pytest.mark.parametrize("determinism", ["default", "deterministic"])
def test_without_it_bits_depend_on_ranks(determinism: str) -> None:
    """Even without dropout, and cut into the same micro-batches."""
    config = text(determinism, 0.0, batch={"global_size": 12, "micro_size": 2})
    alone, beside = (recorded_all([config], ranks, UPDATES)[0] for ranks in (1, 2))
    assert other_bits(beside, alone)


# --- faults -------------------------------------------------------------------------------------------------------


def two_terms_change_places() -> None:
    from lockstep.sharding import invariant

    total = invariant.total

    def swapped(nodes: Any, values: Any, *rest: Any) -> Any:
        values = list(values)
        if len(values) > 3:
            values[1], values[3] = values[3], values[1]
        return total(nodes, values, *rest)

    invariant.total = swapped


def one_after_the_other() -> None:
    from lockstep.sharding import invariant

    def in_order(nodes: Any, values: Any, terms: int, add: Any) -> Any:
        first, *others = values
        for other in others:
            add(first, other)
        return first

    invariant.total = in_order


def draws_by_rank() -> None:
    from lockstep.distributed.rng import KeyedDraws

    def by_rank(draws: KeyedDraws, batch: Any, micro_batch: int, stage: int) -> None:
        draws._seed_with("forward", batch.step, draws._data_rank, micro_batch)

    KeyedDraws.__call__ = by_rank


FAULTS = {fault.__name__: fault for fault in (two_terms_change_places, one_after_the_other, draws_by_rank)}


def _with_fault(fault: str) -> Trajectory:
    FAULTS[fault]()
    return record_all([CONFIGS["ragged text, AdamW"]], UPDATES, None)[0]


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_noticed(fault: str) -> None:
    assert other_bits(in_world(3, _with_fault, fault)[0], runs(1)["ragged text, AdamW"])


# --- resuming -----------------------------------------------------------------------------------------------------

CUT, STEPS = 3, 7


def _cut_at(folder: str, cut: int | None) -> dict[str, Any]:
    """From the checkpoint of step `cut`; without one from the beginning, saving there."""
    with lockstep.session(text(run={"steps": STEPS, "determinism": "invariant"})) as session:
        checkpoints = Checkpoints(session, LocalStorage(Path(folder)), {})
        checkpoints.begin(Resume(step=cut))
        losses = {}
        for report in session:
            losses[report.step] = report.loss
            if cut is None and report.step == CUT:
                checkpoints.save()
        assert all(ended.failure is None for ended in checkpoints.finish())
        tensors = session.state().tensors
        return {"losses": losses, **{name: value.detach().numpy().tobytes() for name, value in tensors.items()}}


def test_a_run_that_goes_on_with_other_ranks_ends_with_the_same_bits(tmp_path: Path) -> None:
    uncut = in_world(2, _cut_at, str(tmp_path), None)[0]
    assert any(name.startswith("optimizer.exp_avg.") for name in uncut)
    for ranks in (4, 1, 3):
        found = in_world(ranks, _cut_at, str(tmp_path), CUT)[0]
        assert found.pop("losses") == {step: loss for step, loss in uncut["losses"].items() if step > CUT}
        assert found == {name: value for name, value in uncut.items() if name != "losses"}


# --- refusals -----------------------------------------------------------------------------------------------------

REFUSALS = {
    "auto": (
        text(batch={"global_size": 13}),
        "batch.micro_size: auto splits an update by the number of ranks; under run.determinism invariant give a "
        "number, the same for all: 13 is what auto gives on 1 rank",
    ),
    "dp": (
        text(parallel={"strategy": "dp"}),
        "parallel.strategy: dp adds gradients in an order that depends on the ranks; under run.determinism invariant "
        "take ddp, or single on one rank",
    ),
    "fsdp": (
        text(parallel={"strategy": "fsdp"}),
        "parallel.strategy: fsdp adds gradients in an order that depends on the ranks; under run.determinism invariant "
        "take ddp, or single on one rank",
    ),
    "compression": (
        text(parallel={"ddp": {"compression": "fp16"}}),
        "parallel.ddp.compression: fp16 rounds what each rank sends, so that the sum depends on the ranks; under "
        "run.determinism invariant take none",
    ),
    "DDP's own": (
        text(parallel={"ddp": {"static_graph": True, "gradient_as_bucket_view": False, "sync_batchnorm": True}}),
        "parallel.ddp.sync_batchnorm: adds over ranks in their order, which is not available under run.determinism "
        "invariant: take false\n"
        "parallel.ddp.static_graph: is for DDP's own reduction, which under run.determinism invariant is not used: "
        "take false\n"
        "parallel.ddp.gradient_as_bucket_view: false is for DDP's own reduction, which under run.determinism invariant "
        "is not used; gradients are one flat tensor: take true",
    ),
    "compiling": (
        text(model={**text()["model"], "compile": True}),
        "model.compile: compiles for the shapes that a rank sees first, so that kernels depend on the ranks; under "
        "run.determinism invariant take false",
    ),
    "batch norm": (
        points(model={"kind": "custom", "target": "kit.small:WithBatchNorm"}),
        "run.determinism: invariant, but the model has batch norm (norm), which ties samples; take "
        "deterministic, or another norm",
    ),
    "a buffer that counts": (
        points(model={"kind": "custom", "target": "kit.drawing:Counting"}),
        "run.determinism: invariant, but the model's forward changes forwards, which is part of its state: each rank "
        "would change its own, by its own samples; set deterministic, or use a model without running state",
    ),
    "a buffer that is another one": (
        points(model={"kind": "custom", "target": "kit.drawing:Replacing"}),
        "run.determinism: invariant, but the model's forward changes forwards, which is part of its state: each rank "
        "would change its own, by its own samples; set deterministic, or use a model without running state",
    ),
    "an objective that doesn't decompose": (
        points(objective={"kind": "custom", "target": "kit.drawing:Contrast"}),
        "run.determinism: invariant, but the objective's loss is not the sum of its samples' losses; "
        "take deterministic",
    ),
    "double precision": (
        points(model={"kind": "custom", "target": "kit.drawing:Double"}),
        "run.determinism: invariant adds gradients in fp32, and inner.weight is float64; convert the model with "
        ".float()",
    ),
}


def _refusals() -> dict[str, str]:
    return {name: small.refusal(config) for name, (config, _) in REFUSALS.items()}


def test_what_can_not_be_had_is_refused_by_name() -> None:
    found = in_world(1, _refusals)[0]
    assert found == {name: message for name, (_, message) in REFUSALS.items()}
