"""A learning rate that evaluations lower: torch's, on all ranks, after a resume, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import small
from kit.failures import fails
from kit.worlds import in_world

import lockstep
from lockstep.config.schema import Optim, Schedule
from lockstep.core.errors import ConfigError
from lockstep.loop.plateau import PlateauRate
from lockstep.training.exporting import ExportArguments, export

SECTION = {"metric": "held-out.loss", "patience": 0, "factor": 0.3, "threshold": 0.5}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"patience": 1, "cooldown": 2},
        {"threshold": 0.3, "threshold_mode": "abs", "patience": 1},
        {"metric": "held-out.accuracy", "patience": 0, "min_lr": 0.02},
        {"mode": "max", "patience": 1},
        {"patience": 0, "eps": 0.05},
    ],
)
def test_it_is_torch_s(options: dict[str, Any]) -> None:
    section = {"metric": "held-out.loss", "patience": 2, **options}
    schedule = Schedule.model_validate({"kind": "plateau", "plateau": section})
    rate = PlateauRate(Optim(lr=0.1), schedule)
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    highest = "accuracy" in section["metric"] or section.get("mode") == "max"
    own = {key: value for key, value in section.items() if key not in ("metric", "mode")}
    reference = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, "max" if highest else "min", **own)
    for number, value in enumerate([3.0, 2.0, 2.1, float("nan"), 1.9, 1.9, 2.5, 1.0, 1.1, 1.2, 1.3, 1.4, 0.9, 5.0]):
        reference.step(value)
        rate.see({"held-out.loss": value, "held-out.accuracy": value, "other.loss": 0.0})
        rate.see({"other.loss": 0.0})
        assert rate(0.5, 9, 20) == optimizer.param_groups[0]["lr"]
        resumed = PlateauRate(Optim(lr=0.1), schedule)
        resumed.restore(json.loads(json.dumps(rate.state())))
        assert resumed.state() == rate.state()
        rate = resumed if number % 2 else rate


def test_a_state_of_another_metric_is_left_and_another_peak_lowered_as_far() -> None:
    schedule = Schedule.model_validate({"kind": "plateau", "plateau": SECTION})
    rate = PlateauRate(Optim(lr=0.1), schedule)
    for value in (1.0, 1.0):
        rate.see({"held-out.loss": value})
    higher = PlateauRate(Optim(lr=0.2), schedule)
    higher.restore(rate.state())
    assert higher(0.0, 0, None) == pytest.approx(0.06)
    higher.restore({**rate.state(), "metric": "other.loss", "lr": 0.0})
    assert higher(0.0, 0, None) == pytest.approx(0.06)


def config(folder: Path, strategy: str = "single", **sections: Any) -> dict[str, Any]:
    return small.config(
        schedule={"kind": "plateau", "plateau": SECTION, "warmup_steps": 2},
        evaluation={"every": "2 steps"},
        optim={"name": "adamw", "lr": 0.01},
        parallel={"strategy": strategy},
        checkpoint={"every": "2 steps"},
        monitor={"every": 1, "tensorboard": False, "progress": "none"},
        **{"run": {"steps": 12, "folder": str(folder)}, **sections},
    )


def rates(folder: Path) -> list[float]:
    return [json.loads(line)["lr"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def _trained(configs: list[dict[str, Any]]) -> None:
    for each in configs:
        lockstep.train(each)


@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 2), ("fsdp", 2)])
def test_every_strategy_and_a_resumed_run_have_the_same_rates(strategy: str, ranks: int, tmp_path: Path) -> None:
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    lockstep.train(config(tmp_path / "single"))
    expected = rates(tmp_path / "single")
    assert len(set(expected[2:])) > 2, "it was reduced"
    assert expected[1] < expected[2] == 0.01
    shorter = config(cut, strategy, run={"steps": 7, "folder": str(cut)})
    in_world(ranks, _trained, [config(whole, strategy), shorter, config(cut, strategy)])
    assert rates(whole) == rates(cut) == expected
    final = [each / "model" / "model.safetensors" for each in (whole, cut)]
    assert final[0].read_bytes() == final[1].read_bytes()
    export(whole, ExportArguments(format="torch", optimizer=True, to=tmp_path / "state.pt"))
    exported = torch.load(tmp_path / "state.pt", weights_only=True)["optimizer_state_dict"]["param_groups"][0]
    assert (exported["initial_lr"], exported["lr"] < 0.01) == (0.01, True)


@pytest.mark.parametrize(
    ("sections", "key", "named"),
    [
        ({"schedule": {"kind": "plateau"}}, "schedule", ("plateau", "metric")),
        ({"schedule": {"kind": "cosine", "plateau": SECTION}}, "schedule", ("plateau", "cosine")),
        ({"schedule": {"kind": "plateau", "plateau": {"metric": "other.loss"}}}, None, ("other.loss", "held-out")),
        ({"evaluation": {"every": None}}, None, ("schedule.plateau", "evaluation.every")),
    ],
)
def test_a_plateau_that_nothing_would_lower_is_refused(
    sections: dict[str, Any], key: str | None, named: tuple[str, ...], tmp_path: Path
) -> None:
    values = config(tmp_path, **{name: section for name, section in sections.items() if name == "run"})
    with fails(ConfigError, *named, **({} if key is None else {"key": key})):
        lockstep.train({**values, **sections})


def test_a_session_of_a_custom_loop_refuses_it(tmp_path: Path) -> None:
    with fails(ConfigError, key="schedule.plateau"), lockstep.session(config(tmp_path)):
        pass


def test_an_unknown_metric_is_refused_with_the_nearest(tmp_path: Path) -> None:
    values = config(tmp_path)
    values["schedule"]["plateau"] = {**SECTION, "metric": "held-out.perplexity"}
    with fails(ConfigError, "held-out.perplexity", "held-out.loss", key="schedule.plateau.metric"):
        lockstep.train(values)
