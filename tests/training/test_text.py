"""Prompts are encoded as the training data is."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from lockstep.config.loading import validate
from lockstep.training.text import codec_of


def tokenizer(folder: Path, template: str) -> str:
    words = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1, "a": 2, "b": 3}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.post_processor = processors.TemplateProcessing(single=template, special_tokens=[("<s>", 0), ("</s>", 1)])
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(("template", "begin"), [("<s> $A", [0]), ("<s> $A </s>", [0]), ("$A </s>", []), ("$A", [])])
def test_a_prompt_begins_as_texts_do_in_training_and_has_no_end(
    template: str, begin: list[int], tmp_path: Path
) -> None:
    for packed in (False, True):
        data = {"kind": "huggingface", "name": "x", "text": "t", "tokenizer": tokenizer(tmp_path, template)}
        model = {"kind": "huggingface", "task": "causal-lm", "architecture": {"model_type": "gpt2"}}
        sections = {"model": model, "data": {"train": {**data, "packed": packed}}}
        config = validate({"run": {"steps": 1}, "batch": {"global_size": 8}, **sections}).config
        codec = codec_of(config.model, config.data.train)
        assert codec.encode("a b") == [*([] if packed else begin), 2, 3]
        assert codec.end == 1
