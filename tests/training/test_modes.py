"""Modules and optimizers with modes: each has its own again after what runs in evaluation mode."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit import small
from kit.worlds import in_world
from safetensors.torch import load_file
from torch import nn
from torch.nn import functional as F

import lockstep
from lockstep.loop.session import components_of
from lockstep.training.exporting import ExportArguments, export


class WithBackbone(small.Net):
    """Its backbone is frozen, and in evaluation mode, in which its dropout does nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.backbone.requires_grad_(False).eval()

    def forward(self, points: torch.Tensor) -> torch.Tensor:
        return super().forward(self.backbone(points))


def losses(every: int | None, **given: Any) -> tuple[list[float], list[float]]:
    """The losses of training, and those of evaluations."""
    config = small.config(**given.pop("sections", {}))
    del config["model"]
    trained, evaluated = [], []
    with lockstep.session(config, **given) as session:
        for report in session:
            trained.append(report.loss)
            if every is not None and report.step % every == 0:
                evaluated.append(session.evaluate()[0].metrics["loss"])
    return trained, evaluated


def test_a_frozen_part_in_evaluation_mode_stays_so_after_an_evaluation() -> None:
    model = WithBackbone()
    assert losses(1, model=WithBackbone)[0] == losses(None, model=WithBackbone)[0]
    losses(1, model=model)
    assert (model.training, model.backbone[1].training) == (True, False)


def test_a_config_keeps_the_modes_that_a_constructor_has_set() -> None:
    with lockstep.session(
        {**small.config(), "model": {"kind": "custom", "target": f"{__name__}:WithBackbone"}}
    ) as session:
        assert not components_of(session).sharding.state.model.get_submodule("backbone").training


def test_a_model_that_is_in_evaluation_mode_as_a_whole_is_trained_in_training_mode() -> None:
    model = small.WithBatchNorm().eval()
    losses(None, model=model, sections={"batch": {"global_size": 10}})
    assert model.training
    assert model.norm.num_batches_tracked == 8


def test_a_module_undoes_what_its_evaluation_mode_has_done() -> None:
    class Merged(small.Net):
        merged = False

        def train(self, mode: bool = True) -> Any:
            self.merged = not mode
            return super().train(mode)

    model = Merged()
    losses(2, model=model)
    assert not model.merged


# --- optimizers -------------------------------------------------------------------------------------------------------


WHOLE = {
    "batch": {"global_size": 40},
    "optim": {"clip_norm": None},
    "schedule": {"kind": "constant", "warmup_steps": 0},
}


def reference() -> list[float]:
    """What the plain loop evaluates after each update, all samples at once."""
    model, (points, classes) = small.Net(), small.points().tensors
    with lockstep.session(small.config()) as session:
        model.load_state_dict(components_of(session).sharding.state.model.state_dict())
    optimizer, evaluated = small.Averaged(model.parameters()), []
    for _ in range(8):
        optimizer.train()
        F.cross_entropy(model(points), classes).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.eval()
        held_out, labels = small.points(11, 1).tensors
        evaluated.append(F.cross_entropy(model(held_out), labels).item())
    return evaluated


def averaged(every: int | None, strategy: str) -> list[list[float]]:
    config = small.config(parallel={"strategy": strategy}, **WHOLE)
    trained, evaluated = [], []
    with lockstep.session(config, optimizer=small.Averaged) as session:
        for report in session:
            trained.append(report.loss)
            if every is not None and report.step % every == 0:
                evaluated.append(session.evaluate()[0].metrics["loss"])
    return [trained, evaluated]


@pytest.mark.parametrize("strategy", ["single", "ddp", "fsdp"])
def test_evaluations_have_the_weights_of_the_optimizers_eval_and_leave_no_trace(strategy: str) -> None:
    ranks = 1 if strategy == "single" else 2
    trained, evaluated = in_world(ranks, averaged, 1, strategy)[0]
    assert evaluated == pytest.approx(reference(), rel=1e-5)
    assert trained == in_world(ranks, averaged, None, strategy)[0][0]  # bitwise


def test_a_checkpoint_resumes_exactly_and_what_is_exported_are_the_weights_of_eval(tmp_path: Path) -> None:
    def run(name: str, steps: int) -> nn.Module:
        model = small.Net()
        model.load_state_dict(initial)
        config = small.config(
            **WHOLE, run={"steps": steps, "folder": str(tmp_path / name)}, checkpoint={"every": "3 steps"}
        )
        del config["model"]
        lockstep.train(config, model=model, optimizer=small.Averaged)
        return model

    initial = small.Net().state_dict()
    whole = run("whole", 8)
    run("halves", 4)
    halves = run("halves", 8)
    for name, value in whole.state_dict().items():
        assert torch.equal(value, halves.state_dict()[name])
    published = load_file(tmp_path / "whole" / "model" / "model.safetensors")
    exported = load_file(export(tmp_path / "whole", ExportArguments()).target)
    trained, (points, classes) = small.Net(), small.points().tensors
    trained.load_state_dict(initial)
    optimizer = small.Averaged(trained.parameters())
    for _ in range(8):
        optimizer.train()
        F.cross_entropy(trained(points), classes).backward()
        optimizer.step()
        optimizer.zero_grad()
        optimizer.eval()
    for name, value in trained.state_dict().items():
        torch.testing.assert_close(published[name], value)
        assert torch.equal(published[name], exported[name])
        assert torch.equal(published[name], whole.state_dict()[name])
