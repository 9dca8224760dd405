"""Prompts are encoded as the training data is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kit.failures import fails
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

import lockstep
from lockstep.config.loading import validate
from lockstep.core.errors import ConfigError
from lockstep.loop.text import codec_of
from lockstep.training.finished_run import generate_text


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
        assert 1 in codec.ends


_ROWS = [{"input_ids": torch.tensor([2, 3, 2, 1]), "labels": torch.tensor([2, 3, 2, 1])}] * 8
_OPTIONS = {"trust_remote_code": False, "trust_run": False}


def _trained(model: torch.nn.Module, folder: Path) -> Path:
    run = {"folder": str(folder), "steps": 12}
    settings = {"run": run, "batch": {"global_size": 8}, "optim": {"lr": 0.05}, "launch": {"device": "cpu", "ranks": 1}}
    sections = {"model": {"kind": "given"}, "data": {"train": {"kind": "given"}}, **settings}
    lockstep.train(sections, model=model, train_dataset=_ROWS)
    return folder


def test_a_model_that_was_passed_in_python_generates(tmp_path: Path) -> None:
    """It learned: a b a END."""
    torch.manual_seed(0)
    config = GPT2Config(n_layer=1, n_embd=16, n_head=2, n_positions=16, vocab_size=4, eos_token_id=1, bos_token_id=0)
    run = _trained(GPT2LMHeadModel(config), tmp_path / "run")
    name = tokenizer(tmp_path / "tokenizer", "$A")
    greedy = (0.0, None, 1.0, 1)
    with fails(ConfigError, "given", "--tokenizer"):
        generate_text(run, ["a"], 5, greedy, chat=False, tokenizer=None, **_OPTIONS)
    assert generate_text(run, ["a", "a b"], 5, greedy, chat=False, tokenizer=name, **_OPTIONS) == ["b a", "a"]
    with fails(ConfigError, "chat template"):
        generate_text(run, ["a"], 5, greedy, chat=True, tokenizer=name, **_OPTIONS)
    own = PreTrainedTokenizerFast.from_pretrained(name)
    own.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}{% if add_generation_prompt %}b{% endif %}"
    own.save_pretrained(name)
    assert generate_text(run, ["a"], 5, greedy, chat=True, tokenizer=name, **_OPTIONS) == ["a"]


def test_another_module_that_was_passed_in_python_is_refused(tmp_path: Path) -> None:
    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(4, 4)

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.table(input_ids).flatten(0, 1), labels.flatten())

    run = _trained(Own(), tmp_path / "run")
    with fails(ConfigError, "Python", str(run / "model")):
        generate_text(run, ["a"], 5, (0.0, None, 1.0, 1), chat=False, tokenizer=None, **_OPTIONS)
