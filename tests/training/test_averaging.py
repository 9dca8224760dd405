"""An average of the weights: what evaluations and exports use, the same under every strategy and after a resume."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.layouts import asking_for
from kit.runs import differences, recorded_all
from kit.worlds import in_world
from safetensors.torch import load_file
from training.test_same_run import config

import lockstep
from lockstep.config.loading import validate
from lockstep.core.records import DataFacts, ParameterFacts
from lockstep.loop.session import components_of, evaluation_weights
from lockstep.plan.plan import make_plan
from lockstep.training.exporting import ExportArguments, export

Weights = dict[str, torch.Tensor]


def averaged(ema: dict[str, Any] | None = None, **sections: Any) -> dict[str, Any]:
    found = config(13, 3, **sections)
    return {**found, "optim": {**found["optim"], "lr": 0.01, "ema": ema or {"decay": 0.5, "every": 2, "start": 1}}}


def weights(session: Any) -> Weights:
    return {name: value.clone() for name, value in components_of(session).sharding.state.weights()}


def test_it_is_the_average_of_the_weights_and_training_continues_without_it() -> None:
    plain = averaged()
    del plain["optim"]["ema"]
    with lockstep.session(plain) as session:
        expected = [weights(session) for _ in session]
    average = expected[0]  # after step 1
    with lockstep.session(averaged()) as session:
        for report in session:
            assert all(torch.equal(value, expected[report.step - 1][name]) for name, value in weights(session).items())
            if report.step > 1 and (report.step - 1) % 2 == 0:
                average = {name: (average[name] + expected[report.step - 1][name]) / 2 for name in average}
            with evaluation_weights(session):
                found = weights(session)
            assert all(torch.allclose(value, average[name], atol=1e-6) for name, value in found.items()), report.step


@pytest.mark.parametrize("name", ["ddp", "fsdp", "pipeline-1f1b", "tensor"])
def test_evaluations_are_the_single_process_s(name: str) -> None:
    [expected] = recorded_all([averaged()], 1, 4)
    [run] = recorded_all([averaged(parallel=asking_for(name, 2))], 2, 4)
    assert differences(run, expected) == []


def _attempt(config: dict[str, Any], folder: str, until: int | None) -> tuple[int | None, dict[str, bytes]]:
    with lockstep.session(config) as session:
        saves: Any = session.checkpoints(folder)
        for report in session:
            if report.step == until:
                break
        saves.save()
        assert all(ended.failure is None for ended in saves.finish())
        with evaluation_weights(session):
            found = weights(session)
        return saves.resumed_from, {name: value.numpy().tobytes() for name, value in found.items()}


def _attempts(runs: list[tuple[dict[str, Any], str, int | None]]) -> list[tuple[int | None, dict[str, bytes]]]:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        return [_attempt(*run) for run in runs]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("name", "cut"), [("ddp", 3), ("fsdp", 1), ("fsdp", 4), ("pipeline-1f1b", 3)])
def test_a_resumed_run_has_the_same_average(name: str, cut: int, tmp_path: Path) -> None:
    run, place = averaged(parallel=asking_for(name, 2), run={"steps": 6}), str(tmp_path / "cut")
    runs = [(run, str(tmp_path / "uncut"), None), (run, place, cut), (run, place, None)]
    uncut, _, resumed = in_world(2, _attempts, runs)[0]
    assert (resumed[0], resumed[1]) == (cut, uncut[1])


def test_turned_on_or_off_where_a_run_resumes(tmp_path: Path) -> None:
    plain = averaged(run={"steps": 6})
    plain["optim"].pop("ema")
    ema = averaged(run={"steps": 6})
    runs = [
        (plain, f"{tmp_path}/on", 3),
        (ema, f"{tmp_path}/on", 4),
        (ema, f"{tmp_path}/off", 3),
        (plain, f"{tmp_path}/off", None),
    ]
    found = in_world(1, _attempts, runs)[0]
    assert [resumed for resumed, _ in found] == [None, 3, None, 3]


def test_an_average_without_values_begins_where_a_run_resumes(tmp_path: Path) -> None:
    early, late, plain = (averaged({"decay": 0.5, "start": start}, run={"steps": 5}) for start in (1, 100, 1))
    plain["optim"].pop("ema")
    runs = [(late, f"{tmp_path}/late", 3), (early, f"{tmp_path}/late", None)]
    runs += [(plain, f"{tmp_path}/plain", 3), (early, f"{tmp_path}/plain", None)]
    found = in_world(1, _attempts, runs)[0]
    assert found[1] == found[3]
    assert found[1][0] == 3


def _thawed(run: dict[str, Any], folder: str, frozen: list[str]) -> list[dict[str, np.ndarray]]:
    """The weights, and the average, after a step that follows steps with frozen parameters."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    try:
        _attempt({**run, "model": {**run["model"], "freeze": frozen}}, folder, 3)
        with lockstep.session(run) as session:
            session.checkpoints(folder, accept_changes=True)
            found = [weights(session)]
            next(iter(session))
            found.append(weights(session))
            with evaluation_weights(session):
                found.append(weights(session))
        return [{name: value.numpy() for name, value in each.items()} for each in found]
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("frozen", ["embedding.*", "norm.*"])
def test_parameters_that_were_frozen_begin_their_average_where_a_run_resumes(frozen: str, tmp_path: Path) -> None:
    run = averaged({"decay": 0.5}, run={"steps": 6})
    run["optim"] |= {"name": "sgd", "momentum": 0.0}  # without state, which others lack for these parameters
    before, after, average = in_world(1, _thawed, run, str(tmp_path / "run"), [frozen])[0]
    names = [name for name in before if fnmatchcase(name, frozen)]
    assert names
    assert not any(np.array_equal(before[name], after[name]) for name in names)
    halves = {name: (before[name] + after[name]) / 2 for name in before}
    assert all(np.allclose(average[name], halves[name], atol=1e-6) for name in names)
    assert not all(np.allclose(average[name], halves[name], atol=1e-6) for name in halves)


def test_a_run_leaves_and_exports_its_average(tmp_path: Path) -> None:
    lines = {"kind": "stdlib-text", "length": 16, "samples": 40}
    folder = tmp_path / "run"
    lockstep.train(
        {
            "model": {"kind": "transformer", "layers": 1, "width": 16, "heads": 2},
            "data": {"train": lines},
            "batch": {"global_size": 8},
            "optim": {"ema": {"decay": 0.9}, "lr": 0.1},
            "launch": {"device": "cpu"},
            "checkpoint": {"every": "2 steps"},
            "monitor": {"tensorboard": False, "progress": "none"},
            "run": {"steps": 4, "folder": str(folder)},
        }
    )
    left = load_file(folder / "model" / "model.safetensors")
    exported = load_file(export(folder, ExportArguments(to=tmp_path / "out")).target)
    raw = torch.load(export(folder, ExportArguments(to=tmp_path / "a.pt", optimizer=True)).target, weights_only=True)
    assert left.keys() == exported.keys()
    assert all(torch.equal(left[name], exported[name]) for name in left)
    assert not any(torch.equal(left[name], raw["model_state_dict"][name]) for name in left if left[name].ndim == 2)
    assert all(
        entry.keys() == {"step", "exp_avg", "exp_avg_sq"} for entry in raw["optimizer_state_dict"]["state"].values()
    )


def test_a_plan_counts_it() -> None:
    facts = [ParameterFacts("weight", (8, 8), 4, True)]
    with_average, plain = averaged(), averaged()
    del plain["optim"]["ema"]
    plans = [make_plan(validate(each).config, 1, DataFacts(40, None), facts) for each in (with_average, plain)]
    assert plans[0].placement.optimizer - plans[1].placement.optimizer == 8 * 8 * 4
