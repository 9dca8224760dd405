"""Freezing, repeated blocks, facts of parameters, and custom modules."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from kit.failures import fails
from torch import nn

from lockstep.config.schema import CustomModel, GivenModel, TextClassifierModel, TransformerModel
from lockstep.core.errors import ConfigError
from lockstep.core.records import DataFacts, ParameterFacts
from lockstep.models.blocks import repeated_blocks
from lockstep.models.build import build_model, describe_model, parameter_facts
from lockstep.models.parameters import freeze

FACTS = DataFacts(100, 16, vocabulary=30, classes=3)
SMALL = {"layers": 2, "width": 16, "heads": 2}


def _transformer(**more):
    return TransformerModel(kind="transformer", **SMALL, **more)


# --- freezing ------------------------------------------------------------------------------------------------------


def test_only_frozen_parameters_have_no_gradient():
    model = build_model(_transformer(freeze=("blocks.0.*", "*_norm.weight")), FACTS, 1)
    model(torch.zeros(1, 4, dtype=torch.long)).sum().backward()
    for name, parameter in model.named_parameters():
        frozen = name.startswith("blocks.0.") or name.endswith("_norm.weight")
        assert parameter.requires_grad is not frozen
        assert (parameter.grad is None) is frozen


def test_each_name_of_a_tied_parameter_freezes_it():
    model = build_model(_transformer(freeze=("head.*",)), FACTS, 1)
    assert not model.embedding.weight.requires_grad


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("embedding", "did you mean 'embedding.\\*' \\(1 parameters\\)"),
        ("blocks.0.attention.querry.weight", "nearest names: blocks.0.attention.query.weight"),
        ("zzz", "the names begin with blocks, embedding, head, norm"),
        ("*", "keep one to train"),
    ],
)
def test_a_pattern_without_effect_is_refused(pattern, message):
    with pytest.raises(ConfigError, match=message):
        build_model(_transformer(freeze=(pattern,)), FACTS, 1)


def test_all_wrong_patterns_are_reported_together():
    with pytest.raises(ConfigError) as caught:
        freeze(nn.Linear(2, 2), ["wait", "bia"])
    assert len(caught.value.problems) == 2


# --- blocks -------------------------------------------------------------------------------------------------------


class _Alternating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        kinds = (lambda: nn.TransformerEncoderLayer(8, 2, 8), lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU()))
        self.layers = nn.ModuleList(kinds[index % 2]() for index in range(4))
        self.experts = nn.Linear(8, 8)


class _Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(2, 2)) for _ in range(8))


class _Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Experts() for _ in range(2))
        self.heads = nn.ModuleList([nn.Linear(2, 2)])


def test_blocks_of_several_architectures():
    assert repeated_blocks(build_model(_transformer(), FACTS, 1)) == ["blocks.0", "blocks.1"]
    text = build_model(TextClassifierModel(kind="text-classifier", layers=3, width=8), FACTS, 1)
    assert repeated_blocks(text) == ["blocks.0", "blocks.1", "blocks.2"]
    assert repeated_blocks(nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True), 2)) == [
        "layers.0",
        "layers.1",
    ]
    assert repeated_blocks(_Nested()) == ["blocks.0", "blocks.1"]
    assert repeated_blocks(_Alternating()) == [f"layers.{index}" for index in range(4)]


def test_lists_of_lists_are_one_list_of_modules_with_a_forward():
    """A ModuleList, or a ModuleDict, has no forward around which FSDP could gather it."""
    stages = nn.ModuleList(nn.ModuleList(_Experts() for _ in range(depth)) for depth in (1, 2))
    assert repeated_blocks(nn.ModuleDict({"stages": stages})) == ["stages.0.0", "stages.1.0", "stages.1.1"]
    parts = nn.ModuleList(nn.ModuleDict({"mix": _Experts(), "scale": nn.Linear(2, 2)}) for _ in range(2))
    assert repeated_blocks(parts) == [f"{part}.mix.experts.{expert}" for part in range(2) for expert in range(8)]


def test_modules_without_repeated_layers_have_no_blocks():
    assert repeated_blocks(nn.Linear(2, 2)) == []
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU())) == []
    assert repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))) == ["0", "1"]


# --- facts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
def test_facts_count_a_tied_parameter_once(tied):
    section = _transformer(tie_embeddings=tied, freeze=("embedding.*",))
    facts = describe_model(section, FACTS)
    assert facts[0] == ParameterFacts("embedding.weight", (30, 16), 4, trainable=False)
    assert facts == parameter_facts(build_model(section, FACTS, 1))
    assert any(fact.name == "head.weight" for fact in facts) is not tied


def test_planning_imports_few_modules():
    code = (
        "import sys; from lockstep.models.build import describe_model; from lockstep.core.records import DataFacts; "
        "from lockstep.config.schema import TransformerModel; before = len(sys.modules); "
        "describe_model(TransformerModel(kind='transformer'), DataFacts(1, 1, vocabulary=9)); "
        "print(len(sys.modules) - before)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(process.stdout) < 50


def test_planning_allocates_no_memory():
    facts = describe_model(TransformerModel(kind="transformer", layers=80, width=8192, heads=64), FACTS)
    assert sum(fact.elements for fact in facts) > 60e9


# --- custom modules -------------------------------------------------------------------------------------------------

FILE = """
import torch
from torch import nn

class ReadsValues(nn.Module):
    def __init__(self, width=4, zero=False):
        super().__init__()
        self.layer = nn.Linear(width, width)
        if zero:
            nn.init.zeros_(self.layer.weight)
        self.norm = self.layer.weight.detach().norm().item()

def number():
    return 3
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "custom.py"
    path.write_text(FILE)
    return path


def test_a_module_from_a_users_file(file):
    section = CustomModel(kind="custom", target=f"{file}:ReadsValues", arguments={"width": 3}, freeze=("*.bias",))
    model = build_model(section, FACTS, 1)
    assert model.layer.weight.shape == (3, 3)
    assert not model.layer.bias.requires_grad
    assert describe_model(section, FACTS) == parameter_facts(model)  # although its constructor reads values


def test_the_values_of_a_custom_constructor_are_kept(file):
    model = build_model(CustomModel(kind="custom", target=f"{file}:ReadsValues", arguments={"zero": True}), FACTS, 1)
    assert model.layer.weight.count_nonzero() == 0


def test_a_target_that_returns_no_module_is_refused(file):
    with fails(ConfigError, f"{file}:number", "int", "torch.nn.Module"):
        build_model(CustomModel(kind="custom", target=f"{file}:number"), FACTS, 1)


def test_a_given_model_is_not_built():
    for build in (
        lambda: build_model(GivenModel(kind="given"), FACTS, 1),
        lambda: describe_model(GivenModel(kind="given"), FACTS),
    ):
        with fails(ConfigError, "Python"):
            build()


@pytest.mark.parametrize("vocabulary", [None, 20])
def test_the_vocabulary_comes_from_the_data_or_the_config(vocabulary):
    facts = FACTS if vocabulary else DataFacts(100, 16)
    said = (20, 30) if vocabulary else ("the data doesn't determine",)
    with fails(ConfigError, *said, key="model.vocabulary"):
        build_model(_transformer(vocabulary=vocabulary), facts, 1)
