"""Tokens that were added to a tokenizer get the mean of the pretrained rows; tied heads stay tied."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.config.schema import HuggingFaceModel
from lockstep.core.records import DataFacts
from lockstep.models.huggingface import build_huggingface


@pytest.mark.parametrize("tied", [True, False])
def test_new_tokens_start_as_the_mean_of_the_others(tied: bool, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    config = transformers.AutoConfig.for_model("llama", **sizes, vocab_size=10, tie_word_embeddings=tied)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    section = HuggingFaceModel(kind="huggingface", task="causal-lm", pretrained=str(tmp_path))
    model = build_huggingface(section, DataFacts(5, None, vocabulary=13), 0, trust_remote_code=False)
    for weight in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
        assert torch.equal(weight[10:], weight[:10].mean(0).expand(3, -1))
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) is tied
