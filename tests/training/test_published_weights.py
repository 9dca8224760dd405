"""What a run publishes is the whole model, whatever divided it: the same names and shapes in the file as the single
process's, and a missing tensor is an error instead of a published file."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.failures import fails, gives
from kit.families import family
from kit.small import WithTies, config, in_group
from kit.worlds import in_world
from safetensors.torch import load_file

import lockstep
from lockstep.core.errors import RunFailed
from lockstep.loop.session import components_of
from lockstep.models.model_tensors import model_tensors
from lockstep.training.exporting import ExportArguments, export
from lockstep.training.publishing import publish

DIVIDED: dict[str, dict[str, Any]] = {
    "pipeline": {"strategy": "ddp", "pipeline": 2},
    "pipeline+fsdp": {"strategy": "fsdp", "pipeline": 2},
    "tensor": {"strategy": "ddp", "tensor": 2},
    "fsdp": {"strategy": "fsdp"},
    "zero3": {"strategy": "deepspeed", "deepspeed": {"zero_stage": 3}},
}  # fmt: skip
# gpt2: tied across stages; mixtral: other names in the file than in the model; bert: a class's head
ROWS = [("gpt2", "pipeline"), ("gpt2", "pipeline+fsdp"), ("gpt2", "fsdp"), ("gpt2", "zero3"), ("mixtral", "pipeline")]
ROWS += [("mixtral", "tensor"), ("bert", "pipeline")]


def trained(name: str, folder: Path, **parallel: Any) -> Path:
    sections = family(name)
    if name == "mixtral":  # two ranks divide two heads
        asked = sections["model"]["architecture"]
        sections["model"]["architecture"] = {**asked, "num_key_value_heads": 2}
    settings = {
        **sections,
        "batch": {"global_size": 8},
        "optim": {"name": "sgd", "lr": 1e-2},
        "precision": {"compute": "fp32"},
        "launch": {"device": "cpu"},
        "monitor": {"tensorboard": False, "progress": "none"},
        "checkpoint": {"every": "1 steps"},
        "parallel": parallel,
        "run": {"steps": 1, "folder": str(folder)},
    }
    return lockstep.train(settings).folder


def training(name: str, way: str, folder: Path) -> None:
    with in_group():
        trained(name, folder, **({"strategy": "single"} if way == "single" else DIVIDED[way]))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """The folder of a run, which is trained if a test asks for it."""
    folder = tmp_path_factory.mktemp("published")

    @cache
    def run(name: str, way: str) -> Path:
        in_world(1 if way == "single" else 2, training, name, way, folder / name / way)
        return folder / name / way

    return run


@cache
def published(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize(("name", "way"), ROWS)
def test_a_divided_run_publishes_the_whole_model(
    name: str, way: str, run: Callable[[str, str], Path], tmp_path: Path
) -> None:
    expected, mine = published(run(name, "single") / "model"), published(run(name, way) / "model")
    assert {key: one.shape for key, one in mine.items()} == {key: one.shape for key, one in expected.items()}
    for key, one in mine.items():
        assert torch.allclose(one, expected[key], atol=1e-6), key
    exported = export(run(name, way), ExportArguments(to=tmp_path / "out", trust_run=True)).target
    again = published(exported)
    assert list(again) == list(mine)
    assert all(torch.equal(again[key], one) for key, one in mine.items())


def test_transformers_finds_every_weight(run: Callable[[str, str], Path]) -> None:
    from transformers import GPT2LMHeadModel

    _, found = GPT2LMHeadModel.from_pretrained(run("gpt2", "pipeline") / "model", output_loading_info=True)
    assert not found["missing_keys"]
    assert not found["unexpected_keys"]


def _publish_another(folder: Path) -> tuple[str, str]:
    """Publish a model that lacks a tensor, and one with a reshaped parameter; return the refusals."""
    messages = []
    for changes in ({"inner.bias": None}, {"head.weight": torch.zeros(1, 8)}):
        with lockstep.session(config()) as session:
            state = components_of(session).sharding.state
            own = {**state._tensors()[0], **changes}
            state._tensors = lambda own=own: ({name: one for name, one in own.items() if one is not None}, {})
            with pytest.raises(RunFailed) as refusal:
                publish(session, lambda: folder)
            messages.append(str(refusal.value))
    return messages[0], messages[1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_missing_and_reshaped_tensors_are_no_published_model(ranks: int, tmp_path: Path) -> None:
    for missing, reshaped in in_world(ranks, _publish_another, tmp_path):
        assert gives(missing, 1, "4 tensors", "inner.bias")
        assert gives(reshaped, "head.weight", "[1, 8]", "[3, 8]")
    assert list(tmp_path.iterdir()) == []


def test_a_file_of_a_library_is_compared_too() -> None:
    listed = model_tensors(WithTies())
    shapes = dict(listed.shapes)
    assert listed.tied == {"second.weight": "first.weight"}
    listed.refuse_incomplete_file({**shapes, "second.weight": shapes.pop("first.weight")}, (), "files")
    split = {key: shape for key, shape in shapes.items() if key != "first.bias"}
    listed.refuse_incomplete_file({**split, "first.weight": (4, 4), "a": (1,), "b": (3,)}, (), "files")
    with fails(RunFailed, 1, "9 tensors", "4 elements", "1 elements"):
        listed.refuse_incomplete_file({**split, "first.weight": (4, 4), "a": (1,)}, (), "files")
    listed.refuse_incomplete_file({**split, "first.weight": (4, 4)}, {"first.bias"}, "files")


def test_a_state_without_all_tensors_is_not_saved() -> None:
    with lockstep.session(config()) as session:
        components_of(session).sharding.state.model.head = torch.nn.Identity()
        with fails(RunFailed, 2, "4 tensors", "head"):
            session.state()
