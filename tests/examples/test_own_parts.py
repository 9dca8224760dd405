"""An objective, a data source and an optimizer of a user's: by object, by `module:Name`, and as an installed
package."""

from __future__ import annotations

import importlib
import inspect
import os
from pathlib import Path
from typing import Any

import pytest
from kit.worlds import in_world

import lockstep
from lockstep.config.loading import load
from lockstep.config.writing import to_plain

ROOT = Path(__file__).parents[2]
QUICK = {"run": {"steps": 4}, "launch": {"device": "cpu"}, "precision": {"compute": "fp32"}}
ENTRY_POINTS = """
[lockstep.objectives]
quantile = examples.own_parts:Quantile
[lockstep.sources]
waves = examples.own_parts:Waves
[lockstep.optimizers]
sign-momentum = examples.own_parts:SignMomentum
[lockstep.models]
curve = examples.squares:Curve
"""


def config(**changes: Any) -> dict[str, Any]:
    plain = to_plain(load([ROOT / "examples" / "own_parts.yaml"]).config)
    plain["run"].pop("epochs")
    for key, value in {**QUICK, "monitor": {"tensorboard": False, "progress": "none"}, **changes}.items():
        plain[key] = {**plain[key], **value}
    return plain


def losses(sections: dict[str, Any], **objects: Any) -> list[float]:
    with lockstep.session(sections, **objects) as session:
        reports = [report.loss for report in session]
        return [*reports, session.evaluate()[0].metrics["loss"]]


@pytest.fixture
def in_examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(ROOT))


def in_root() -> list[float]:
    os.chdir(ROOT)
    return losses(config())


def test_the_example_trains_the_same_on_one_process_and_two_ranks(in_examples: None) -> None:
    single = losses(config())
    assert len(single) == 5
    assert in_world(2, in_root) == [pytest.approx(single, rel=1e-5)] * 2


def test_objects_and_names_train_the_same(in_examples: None) -> None:
    parts = importlib.import_module("examples.own_parts")
    named = losses(config())
    sections = config()
    del sections["objective"], sections["data"]
    sections["optim"] = {"lr": 2e-3}
    objects = {
        "objective": parts.Quantile(), "train_dataset": parts.Waves(), "eval_datasets": {"coarse": parts.Waves(100)},
        "optimizer": lambda groups: parts.SignMomentum(groups, momentum=0.8),
    }  # fmt: skip
    assert losses(sections, **objects) == named


def test_an_installed_package_registers_its_parts(
    in_examples: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = losses(config())
    folder = tmp_path / "own_parts-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: own-parts\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(str(tmp_path))
    registered = config(
        model={"target": "curve"}, objective={"target": "quantile"}, optim={"target": "sign-momentum"},
        data={"train": {"kind": "custom", "target": "waves"}},
    )  # fmt: skip
    assert losses(registered) == named


@pytest.mark.parametrize("name", ["Quantile", "Waves", "SignMomentum"])
def test_each_is_short(name: str, in_examples: None) -> None:
    thing = getattr(importlib.import_module("examples.own_parts"), name)
    assert len(inspect.getsource(thing).splitlines()) < 40


@pytest.mark.parametrize(
    ("optim", "message"),
    [
        ({"target": "sign-momentums"}, r"optim\.target: 'sign-momentums' is not registered in lockstep\.optimizers"),
        ({"target": "examples.own_parts:Sign"}, r"optim\.target: .*has no Sign"),
        ({"target": "math:pi"}, r"optim\.target: math:pi is a float, not .* parameter groups"),
        ({"arguments": {"speed": 1}}, r"optim\.arguments: .*unexpected keyword argument 'speed'"),
        ({"target": "torch.optim:LBFGS", "arguments": {}}, "LBFGS evaluates the loss several times"),
    ],
)
def test_optimizers_that_cannot_be_made_are_refused(in_examples: None, optim: dict[str, Any], message: str) -> None:
    with pytest.raises(lockstep.ConfigError, match=message):
        losses(config(optim=optim))
