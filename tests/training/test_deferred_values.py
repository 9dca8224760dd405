"""Initial values that other values replace are never drawn, and an evaluation has no optimizer."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.families import family
from kit.small import in_group
from kit.worlds import in_world

import lockstep
from lockstep.assembly.user_objects import UserObjects
from lockstep.config.schema import Config
from lockstep.distributed.shard_boxes import copy_from_full
from lockstep.loop.components import Purpose
from lockstep.loop.session import components_of
from lockstep.models import meta_model
from lockstep.training import assemble as assembling
from lockstep.training import finished_run
from lockstep.training.finished_run import evaluate_run, generate_text
from lockstep.training.job import opened

TEXT = {"kind": "stdlib-text", "length": 16, "samples": 40}
OWN = {
    "model": {"kind": "transformer", "layers": 2, "width": 16, "heads": 2},
    "data": {"train": TEXT, "evaluation": {"held-out": {**TEXT, "samples": 9}}},
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "ddp": {"strategy": "ddp"},
    "fsdp": {"strategy": "fsdp"},
    "pipeline": {"strategy": "ddp", "pipeline": 2},
    "zero1": {"strategy": "deepspeed", "deepspeed": {"zero_stage": 1}},
    "zero3": {"strategy": "deepspeed", "deepspeed": {"zero_stage": 3}},
}


def _config(name: str, folder: Path | None = None, steps: int = 2, **parallel: Any) -> dict[str, Any]:
    return {
        **(OWN if name == "own" else family(name)),
        "batch": {"global_size": 8},
        "precision": {"compute": "fp32"},
        "launch": {"device": "cpu"},
        "monitor": {"tensorboard": False, "progress": "none"},
        "checkpoint": {"every": "2 steps"},
        "parallel": parallel,
        "schedule": {"kind": "constant"},
        "run": {"steps": steps, **({} if folder is None else {"folder": str(folder)})},
    }


def _weights(session: Any) -> dict[str, np.ndarray]:
    return {name: value.clone().numpy() for name, value in components_of(session).sharding.state.weights()}


def _drawn_later(name: str) -> list[str]:
    """Return the strategies under which values that were drawn after all, or their first update, differ.

    And those whose initial values are others than ddp's.
    """
    different = []
    with in_group():
        with opened(Config.model_validate(_config(name, strategy="ddp"), strict=False), UserObjects()) as session:
            expected = _weights(session)
        for strategy, parallel in STRATEGIES.items():
            config = Config.model_validate(_config(name, steps=1, **parallel), strict=False)
            results = []
            for purpose in (Purpose.TRAIN, Purpose.RESUME):
                with opened(config, UserObjects(), purpose) as session:
                    components_of(session).draw()
                    before = _weights(session)
                    assert len(list(session)) == 1
                    results.append((before, _weights(session)))
            if not all(np.array_equal(results[0][0][key], expected[key]) for key in expected):
                different.append(f"{strategy}: initial values")
            for when, first, second in zip(("drawn", "updated"), *results, strict=True):
                if not all(np.array_equal(first[key], second[key]) for key in first):
                    different.append(f"{strategy}: {when}")
    return different


@pytest.mark.parametrize("name", ["own", "gpt2"])
def test_values_can_be_drawn_after_all(name: str) -> None:
    assert in_world(2, _drawn_later, name) == [[], []]


def _resumed(folder: Path) -> dict[str, tuple[int, bool]]:
    """Return, by strategy, the parameters that a resumed run has drawn, and whether it ends like a whole run."""
    results = {}
    original, drawn = copy_from_full, 0

    def counted(tensor: Any, value: Any) -> None:
        nonlocal drawn
        drawn += 1
        original(tensor, value)

    with in_group():
        for name, parallel in STRATEGIES.items():
            asked, model = _config("own", folder / name, steps=4, **parallel), folder / name / "model/model.safetensors"
            lockstep.train(asked)
            whole = model.read_bytes()
            _cut_back(folder / name)
            meta_model.copy_from_full, drawn = counted, 0
            lockstep.train(asked)
            meta_model.copy_from_full = original
            results[name] = drawn, whole == model.read_bytes()
    return results


def _cut_back(run: Path) -> None:
    """Leave what a run has that was killed after its second update."""
    torch.distributed.barrier()  # all ranks have read what it ended with
    if torch.distributed.get_rank() == 0:
        shutil.rmtree(run / "model")
        shutil.rmtree(run / "checkpoints" / "step-00000004")
        (run / "summary.json").unlink()
    torch.distributed.barrier()


def test_a_resumed_run_draws_nothing(tmp_path: Path) -> None:
    for of_rank in in_world(2, _resumed, tmp_path):
        assert of_rank == dict.fromkeys(STRATEGIES, (0, True))


def _refuse(*arguments: Any, **options: Any) -> Any:
    raise AssertionError("not needed")


def _evaluate(folder: Path) -> dict[str, Any] | None:
    assembling.build_optimizer = assembling.build_elementwise = assembling.custom_optimizer = _refuse
    meta_model.copy_from_full = _refuse
    with in_group():
        return evaluate_run(folder, None, trust_remote_code=False, trust_run=True)[1]


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp", "zero3"])
def test_an_evaluation_has_no_optimizer_and_draws_nothing(strategy: str, tmp_path: Path) -> None:
    ranks = 1 if strategy == "single" else 2
    parallel = STRATEGIES.get(strategy, {"strategy": "single"})
    (summary, *_) = in_world(ranks, _trained, _config("own", tmp_path / "run", **parallel))
    metrics = in_world(ranks, _evaluate, tmp_path / "run")[0]
    assert metrics is not None
    assert metrics["held-out"] == pytest.approx(summary["evaluation"]["held-out"], rel=1e-6)


def _trained(config: dict[str, Any]) -> Any:
    with in_group():
        return lockstep.train(config).summary


def test_generated_text_needs_no_values_but_the_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lockstep.train(_config("own", tmp_path / "run", strategy="single"))
    options: dict[str, Any] = {"chat": False, "tokenizer": None, "trust_remote_code": False, "trust_run": True}
    sampling = (0.0, None, 1.0, 1)
    expected = generate_text(tmp_path / "run", ["def "], 5, sampling, **options)
    for owner, name in ((torch.Tensor, "normal_"), (finished_run, "make_model"), (meta_model, "copy_from_full")):
        monkeypatch.setattr(owner, name, _refuse)
    assert generate_text(tmp_path / "run", ["def "], 5, sampling, **options) == expected
