"""A model whose values are made block by block is bitwise the model that is built at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.schema import Config
from lockstep.core.records import DataFacts
from lockstep.models.build import build_meta_model, build_model
from lockstep.models.meta_model import reset_by_block, resets_stay_in_blocks

FACTS = DataFacts(samples=8, tokens_per_sample=16, vocabulary=40, classes=3, padding=0)
TINY: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 3, "num_attention_heads": 2},
    "qwen3": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
              "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True},
    "mixtral": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2,
                "num_key_value_heads": 2, "num_local_experts": 4},
    "gpt2": {"n_embd": 16, "n_layer": 2, "n_head": 2},
    "bert": {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2},
    "t5": {"d_model": 16, "d_ff": 24, "d_kv": 8, "num_layers": 2, "num_heads": 2},
    "rwkv": {"hidden_size": 16, "attention_hidden_size": 16, "num_hidden_layers": 2, "context_length": 40},
}  # fmt: skip
TASKS = {"bert": "sequence-classification", "t5": "seq2seq"}


def section(model: dict[str, Any]) -> Any:
    return Config.model_validate(
        {"model": model, "data": {"train": {"kind": "given"}}, "run": {"steps": 1}}, strict=False
    ).model


def family(name: str, **more: Any) -> dict[str, Any]:
    task = TASKS.get(name, "causal-lm")
    return {"kind": "huggingface", "task": task, "architecture": {"model_type": name, **TINY[name]}, **more}


OWN = [
    {"kind": "transformer", "layers": 2, "width": 16, "heads": 2},
    {"kind": "transformer", "layers": 2, "width": 16, "heads": 2, "tie_embeddings": False},
    {"kind": "text-classifier", "width": 8},
    {"kind": "image-classifier", "width": 4},
]


def filled(model: dict[str, Any], seed: int = 3) -> dict[str, torch.Tensor]:
    blank = build_meta_model(section(model), FACTS, seed)
    assert blank is not None
    assert all(parameter.is_meta for parameter in blank.model.parameters())
    assert not any(buffer.is_meta for buffer in blank.model.buffers())
    values = {}
    for name, value in blank.values([name for name, _ in blank.model.named_parameters()]):
        values[name] = value.detach().clone()
    return values


def assert_equal(values: dict[str, torch.Tensor], whole: torch.nn.Module) -> None:
    parameters = dict(whole.named_parameters())
    assert set(parameters) <= set(values)
    for name, parameter in parameters.items():
        assert torch.equal(values[name], parameter), name


@pytest.mark.parametrize("model", OWN, ids=str)
def test_lockstep_models(model: dict[str, Any]) -> None:
    assert_equal(filled(model), build_model(section(model), FACTS, 3))


@pytest.mark.parametrize("name", TINY)
def test_transformers_models(name: str) -> None:
    whole = build_model(section(family(name)), FACTS, 3)
    assert_equal(filled(family(name)), whole)
    blank = build_meta_model(section(family(name)), FACTS, 3)
    assert blank is not None
    for (name, buffer), (other, expected) in zip(blank.model.named_buffers(), whole.named_buffers(), strict=True):
        assert name == other
        assert torch.equal(buffer, expected), name


def test_no_value_is_made_that_no_one_wants(monkeypatch: pytest.MonkeyPatch) -> None:
    blank = build_meta_model(section(family("llama")), FACTS, 3)
    assert blank is not None
    wanted = "model.layers.1.mlp.up_proj.weight"
    assert [name for name, _ in blank.values([wanted])] == [wanted]
    assert list(blank.values([])) == []


def test_a_parameter_without_a_reset_has_no_value() -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (torch.nn.Parameter(torch.empty(4, 8, device="meta")) for _ in range(2))
            self.third = torch.nn.Parameter(torch.empty(4, device="meta"))

        def reset(self) -> None:
            torch.nn.init.normal_(self.first)
            torch.nn.init.uniform_(self.second)

    model = Odd()
    names = ["first", "second", "third"]
    values = dict(reset_by_block(model, 3, {"": model.reset}, [], names))
    assert values["third"] is None
    assert values["second"] is not None
    assert 0 < float(values["second"].min()) < float(values["second"].max()) < 1


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_pretrained_weights(tmp_path: Path, name: str) -> None:
    build_model(section(family(name)), FACTS, 5).save_pretrained(tmp_path)  # type: ignore[operator]
    model = {"kind": "huggingface", "task": "causal-lm", "pretrained": str(tmp_path)}
    assert_equal(filled(model), build_model(section(model), FACTS, 3))


def test_a_new_head_on_pretrained_weights(tmp_path: Path) -> None:
    """The weights have another head than the model: only the library knows how to match them."""
    build_model(section(family("llama")), FACTS, 5).save_pretrained(tmp_path)  # type: ignore[operator]
    model = {"kind": "huggingface", "task": "sequence-classification", "pretrained": str(tmp_path)}
    assert build_meta_model(section(model), FACTS, 3) is None


def test_a_custom_module_has_no_meta_model() -> None:
    assert build_meta_model(section({"kind": "custom", "target": "kit.small:Net"}), FACTS, 3) is None


@pytest.mark.parametrize("fill", [torch.nn.init.normal_, torch.nn.init.zeros_])
def test_a_reset_that_changes_another_block_is_detected(fill: Any) -> None:
    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(2, 2, device="meta") for _ in range(2))

    model, pieces = Outer(), ["blocks.0", "blocks.1"]
    for reached in pieces:
        weight = model.get_submodule(reached).weight
        assert resets_stay_in_blocks(model, {reached: lambda weight=weight: fill(weight)}, pieces)
        assert not resets_stay_in_blocks(model, {"": lambda weight=weight: fill(weight)}, pieces)
