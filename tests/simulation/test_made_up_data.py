"""Estimates of runs whose data isn't on this machine: made-up batches have the form that the task's have."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from simulation.test_peak_memory import NOTHING

from lockstep.cli.main import main
from lockstep.config.schema import Config
from lockstep.core.errors import ConfigError
from lockstep.core.extensions import construct
from lockstep.plan.stated_facts import sizes_of_config
from lockstep.simulation.estimate import estimator_of, readable
from lockstep.training.api import resolved

BERT = {"model_type": "bert", "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "vocab_size": 64}
T5 = {"model_type": "t5", "d_model": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": 64}
LENGTH, SAMPLES = 24, 3


def run_of(model: dict[str, Any], **data: Any) -> dict[str, Any]:
    hub = {
        "kind": "huggingface",
        "name": "nobody/not-on-this-machine",
        "tokenizer": "no/tokenizer",
        "max_length": LENGTH,
    }
    return {
        "model": model,
        "data": {"train": {**hub, **data}},
        "batch": {"global_size": 8, "micro_size": 2},
        "optim": {"name": "adamw", "lr": 1e-3},
        "run": {"epochs": 1},
    }


def hf(task: str, architecture: dict[str, Any] = BERT, classes: int | None = None, **keys: Any) -> dict[str, Any]:
    classes_key = {} if classes is None else {"classes": classes}
    sizes = {**architecture, **({"num_attention_heads": 2} if architecture is BERT else {}), **keys}
    return {"kind": "huggingface", "task": task, "architecture": sizes, **classes_key}


IDS, CLASSES = ((SAMPLES, LENGTH), torch.int64), ((SAMPLES,), torch.int64)
BATCHES: dict[str, tuple[dict[str, Any], tuple[str, ...], tuple[tuple[int, ...], torch.dtype]]] = {
    "causal-lm": (run_of(hf("causal-lm")), ("input_ids", "attention_mask"), IDS),
    "packed": (run_of(hf("causal-lm"), packed=True), ("input_ids",), IDS),
    "packed, each for itself": (run_of(hf("causal-lm"), packed="whole"), ("input_ids", "position_ids"), IDS),
    "masked-lm": (run_of(hf("masked-lm")), ("input_ids", "attention_mask"), IDS),
    "seq2seq": (run_of(hf("seq2seq", T5), label="target"), ("input_ids", "attention_mask"), IDS),
    "classes": (
        run_of(hf("sequence-classification", classes=4), label="class"),
        ("input_ids", "attention_mask"),
        CLASSES,
    ),
    "tags": (
        run_of(hf("token-classification", classes=3), text="words", label="tags"),
        ("input_ids", "attention_mask"),
        IDS,
    ),
    "choices": (
        run_of(hf("multiple-choice"), text_pair=("first", "second"), label="right"),
        ("input_ids", "attention_mask"),
        CLASSES,
    ),
    "numbers": (
        run_of(hf("sequence-classification", classes=1, problem_type="regression"), label="score"),
        ("input_ids", "attention_mask"),
        ((SAMPLES,), torch.float32),
    ),
    "several classes": (
        run_of(hf("sequence-classification", classes=4, problem_type="multi_label_classification"), label="topics"),
        ("input_ids", "attention_mask"),
        ((SAMPLES, 4), torch.float32),
    ),
    "own classifier": (
        run_of({"kind": "text-classifier", "vocabulary": 64, "classes": 3}, label="class"),
        ("tokens", "mask"),
        CLASSES,
    ),
    "own language model": (run_of({"kind": "transformer", "vocabulary": 64}), ("tokens",), IDS),
}  # fmt: skip


@pytest.mark.parametrize("name", BATCHES)
def test_batches_have_the_inputs_and_targets_of_the_task(name: str) -> None:
    asked, inputs, (shape, dtype) = BATCHES[name]
    config = Config.model_validate(asked)
    facts = sizes_of_config(config)
    assert facts is not None
    section: Any = readable(config, facts).data.train
    batch = construct("sources", section.target, section.arguments).fetch(np.arange(SAMPLES))
    assert tuple(batch.inputs) == inputs
    assert all((value.shape[0], value.shape[-1]) == (SAMPLES, LENGTH) for value in batch.inputs.values())
    assert (tuple(batch.targets.shape), batch.targets.dtype) == (shape, dtype)


@pytest.mark.parametrize("name", ["seq2seq", "own classifier"])
def test_an_estimate_needs_no_data(name: str) -> None:
    config = resolved(BATCHES[name][0], NOTHING)
    row = next(estimator_of(config, 1, None, NOTHING).estimates())
    assert row.peak is not None, row.note
    assert row.peak.by_category["activations"] > 0
    assert sum(module.parameters for module in row.modules) * 4 == row.peak.by_category["parameters"]


def test_a_task_without_batches_is_refused_as_its_run_is() -> None:
    config = Config.model_validate(run_of(hf("audio-classification", classes=3), label="tags"))
    facts = sizes_of_config(config)
    assert facts is not None
    with pytest.raises(ConfigError, match=r"has batches for causal-lm, .*, but this model is made for audio-class"):
        readable(config, facts)


def test_data_that_is_not_here_leaves_the_length_unknown(capsys: pytest.CaptureFixture[str]) -> None:
    shape = "{model_type: llama, vocab_size: 64, hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2}"
    model = ["--model.pretrained", "null", "--model.architecture", shape]
    assert main(["plan", "llama2-wikitext", "--ranks", "8", "--peak", "none", *model]) == 0
    printed = capsys.readouterr().out
    assert "steps         unknown in advance\n" in printed
    assert "warning: data.train was not read, so the run's length isn't known: " in printed
