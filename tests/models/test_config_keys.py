"""Keys of older config.json files have the meaning that transformers gives them, also with pretrained weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.config.schema import HuggingFaceModel
from lockstep.core.errors import ConfigError
from lockstep.core.records import DataFacts
from lockstep.models.build import build_model, sketch_model

FACTS = DataFacts(1, None)
SMALL = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 30,
}  # fmt: skip
LLAMA = {"model_type": "llama", **SMALL, "num_key_value_heads": 1}
LINEAR = {"type": "linear", "factor": 2.0}


def config_of(**section: Any) -> Any:
    return sketch_model(HuggingFaceModel(kind="huggingface", task="causal-lm", **section), FACTS).config


OLDER: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("llama", {"rope_theta": 5e5}, {"rope_theta": 5e5}),
    ("llama", {"rope_theta": 10000.0}, {"rope_theta": 10000.0}),  # the default
    (
        "llama",
        {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 1e6, "factor": 2.0},
    ),
    ("gpt_neox", {"rotary_pct": 0.5, "rotary_emb_base": 500}, {"rope_theta": 500, "partial_rotary_factor": 0.5}),
    ("phi", {"partial_rotary_factor": 0.25}, {"partial_rotary_factor": 0.25}),
    ("stablelm", {"partial_rotary_factor": 0.5, "rope_theta": 100.0}, {"partial_rotary_factor": 0.5}),
    ("mistral", {"rope_theta": 1e6, "sliding_window": 8}, {"rope_theta": 1e6}),
]


@pytest.mark.parametrize(("kind", "keys", "expected"), OLDER)
def test_an_older_key_is_translated_as_by_the_library(kind: str, keys: dict[str, Any], expected: Any) -> None:
    from transformers import AutoConfig

    config = config_of(architecture={**SMALL, "model_type": kind, **keys})
    assert config.rope_parameters == AutoConfig.for_model(kind, **SMALL, **keys).rope_parameters
    assert expected.items() <= config.rope_parameters.items()


def test_complete_older_files_are_accepted() -> None:
    """The files of GPT-2 and Llama 2 on the hub."""
    gpt2 = {
        "activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1,
        "bos_token_id": 1, "embd_pdrop": 0.1, "eos_token_id": 1, "initializer_range": 0.02,
        "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 64, "n_embd": 16, "n_head": 2, "n_layer": 2,
        "n_positions": 64, "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1,
        "summary_proj_to_labels": True, "summary_type": "cls_index", "summary_use_proj": True,
        "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 30,
    }  # fmt: skip
    assert config_of(architecture=gpt2).n_positions == 64
    llama = {
        **LLAMA, "_name_or_path": "meta", "architectures": ["LlamaForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
        "hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 64, "pretraining_tp": 1,
        "rms_norm_eps": 1e-05, "rope_scaling": None, "tie_word_embeddings": False, "torch_dtype": "float16",
        "transformers_version": "4.31.0", "use_cache": True, "rope_theta": 20000.0,
    }  # fmt: skip
    assert config_of(architecture=llama).rope_parameters["rope_theta"] == 20000.0


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"default_theta": 5.0}, "architecture.default_theta: llama has no such key"),
        ({"rope_thetta": 5.0}, "architecture.rope_thetta: llama has no such key"),
        ({"n_head": 4}, "llama has no such key; did you mean num_attention_heads?"),
        ({"gradient_checkpointing": True}, "gradient_checkpointing: True, but transformers no longer reads this key"),
        ({"position_embedding_type": "relative_key"}, "'relative_key', but transformers no longer reads this key"),
    ],
)
def test_keys_that_would_be_ignored_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(architecture={**LLAMA, **keys})


def test_older_keys_with_pretrained_weights(tmp_path: Path) -> None:
    first = {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}}
    section = HuggingFaceModel(kind="huggingface", task="causal-lm", architecture=first)
    build_model(section, FACTS, 1).save_pretrained(tmp_path)  # type: ignore[operator]
    pretrained = str(tmp_path)
    assert config_of(pretrained=pretrained).rope_parameters["rope_theta"] == 5e5
    parameters = config_of(pretrained=pretrained, architecture={"rope_theta": 10000.0}).rope_parameters
    assert (parameters["rope_theta"], parameters["factor"], parameters["rope_type"]) == (10000.0, 4.0, "linear")
    scaling = {"rope_scaling": {"type": "dynamic", "factor": 2.0}}
    parameters = config_of(pretrained=pretrained, architecture=scaling).rope_parameters
    assert (parameters["rope_theta"], parameters["factor"], parameters["rope_type"]) == (5e5, 2.0, "dynamic")
    assert config_of(pretrained=pretrained, architecture={"attention_dropout": 0.25}).attention_dropout == 0.25


def test_layer_types_with_pretrained_weights(tmp_path: Path) -> None:
    gemma = {**SMALL, "model_type": "gemma3_text", "num_hidden_layers": 4, "num_key_value_heads": 1, "head_dim": 8}
    gemma["sliding_window_pattern"] = 2
    section = HuggingFaceModel(kind="huggingface", task="causal-lm", architecture=gemma)
    model = build_model(section, FACTS, 1)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    kinds = ["sliding_attention", "full_attention"]
    assert model.config.layer_types == kinds * 2
    config = config_of(pretrained=str(tmp_path), architecture={"sliding_window_pattern": 4})
    assert config.layer_types == [kinds[0]] * 3 + [kinds[1]]
