"""Answers that models generate in an evaluation: the same under every strategy that gathers or has the whole model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.failures import fails, gives
from kit.worlds import in_world
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torchmetrics import text as texts
from transformers import PreTrainedTokenizerFast

import lockstep
from lockstep.config.loading import validate
from lockstep.core.errors import ConfigError
from lockstep.loop.session import components_of

ANSWERS = ["b", "b c", "b c d", "c", "d d"]
"""To the prompts a0, a1, ...; ranks have unequal numbers of them, and they end after unequal numbers of tokens."""
METRICS = [
    "exact_match", "wer", "rouge", {"kind": "bleu", "arguments": {"n_gram": 1}}, {"kind": "squad", "name": "span"},
]  # fmt: skip


def files(folder: Path, *, ends: bool) -> dict[str, str]:
    words = ["<p>", "</s>", "b", "c", "d", *(f"a{number}" for number in range(5))]
    made = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, unk_token="<p>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    if ends:
        made.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    fast = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="</s>", pad_token="<p>")
    fast.save_pretrained(folder / "tokenizer")
    rows = [{"text": f"a{number}", "label": answer} for number, answer in enumerate(ANSWERS)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"name": str(folder / "rows.jsonl"), "tokenizer": str(folder / "tokenizer")}


def config(folder: Path, steps: int = 20, *, task: str = "causal-lm", **parallel: Any) -> dict[str, Any]:
    data = {"kind": "huggingface", "label": "label", **files(folder, ends=task == "seq2seq")}
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    architecture = {"model_type": "llama", **sizes, "vocab_size": 12, "eos_token_id": 1, "pad_token_id": 0}
    if task == "seq2seq":
        sizes = {"d_model": 16, "d_ff": 32, "num_layers": 1, "num_heads": 2, "d_kv": 8}
        architecture = {"model_type": "t5", **sizes, "vocab_size": 12, "decoder_start_token_id": 0, "dropout_rate": 0.0}
        architecture |= {"eos_token_id": 1, "pad_token_id": 0}
    return {
        "model": {"kind": "huggingface", "task": task, "architecture": architecture},
        "data": {"train": data, "evaluation": {"held-out": data}},
        "batch": {"global_size": 5},
        "optim": {"lr": 0.05, "clip_norm": 1.0},
        "schedule": {"kind": "constant"},
        "precision": {"compute": "fp32"},
        "parallel": parallel,
        "evaluation": {"generate": {"tokens": 6, "metrics": METRICS}, "micro_size": 2},
        "run": {"steps": steps},
    }


def _evaluated(settings: dict[str, Any]) -> tuple[dict[str, float], list[str]]:
    with lockstep.session(settings) as session:
        for _ in session:
            pass
        [report], [again] = session.evaluate(), session.evaluate()
        assert report.metrics == again.metrics
        components = components_of(session)
        answers: list[str] = []
        if components.plan.strategy == "single":
            model: Any = components.sharding.state.model.eval()
            words = PreTrainedTokenizerFast.from_pretrained(settings["data"]["train"]["tokenizer"])
            for number in range(5):
                ids = torch.tensor([words.encode(f"a{number}")])
                with torch.no_grad():
                    made = model.generate(ids, max_new_tokens=6, do_sample=False)
                only = made[0] if model.config.is_encoder_decoder else made[0, 1:]
                answers.append(words.decode(only, skip_special_tokens=True))
        return dict(report.metrics), answers


WAYS: dict[str, tuple[int, dict[str, Any]]] = {
    "ddp": (3, {"strategy": "ddp"}),
    "fsdp": (2, {"strategy": "fsdp"}),
    "fsdp on three": (3, {"strategy": "fsdp"}),
    "zero3": (2, {"strategy": "deepspeed", "deepspeed": {"zero_stage": 3}}),
    "zero2": (2, {"strategy": "deepspeed", "deepspeed": {"zero_stage": 2}}),
}


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, float], list[str]]:
    return in_world(1, _evaluated, config(tmp_path_factory.mktemp("one"), strategy="single"))[0]  # type: ignore


def _checked(metrics: dict[str, float], answers: list[str]) -> None:
    assert len({len(answer) for answer in answers}) > 1, "they end after unequal numbers of tokens"
    expected = {"exact_match": sum(map(str.__eq__, answers, ANSWERS)) / 5}
    expected["wer"] = float(texts.WordErrorRate()(answers, ANSWERS))
    rouge = texts.ROUGEScore(rouge_keys=("rouge1", "rouge2", "rougeL"))(answers, ANSWERS)
    expected |= {name: float(value) for name, value in rouge.items()}
    expected["bleu"] = float(texts.BLEUScore(1)(answers, [[answer] for answer in ANSWERS]))
    assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-5)
    assert metrics["span_exact_match"] == pytest.approx(100 * expected["exact_match"])


def test_answers_are_those_of_the_library_for_each_prompt_alone(oracle: tuple[dict[str, float], list[str]]) -> None:
    _checked(*oracle)
    assert 0.5 < oracle[0]["exact_match"] <= 1, "it has learned some"


@pytest.mark.parametrize("way", WAYS)
def test_ranks_with_unequal_numbers_have_the_same_metrics(
    way: str, oracle: tuple[dict[str, float], list[str]], tmp_path: Path
) -> None:
    ranks, parallel = WAYS[way]
    for metrics, _ in in_world(ranks, _evaluated, config(tmp_path, **parallel)):
        assert metrics == pytest.approx(oracle[0], rel=1e-2), "the training differs by rounding, the answers don't"
        assert metrics["rougeL_fmeasure"] == pytest.approx(oracle[0]["rougeL_fmeasure"], rel=1e-6)


def test_samples_without_a_prompt_are_not_answered(oracle: tuple[dict[str, float], list[str]], tmp_path: Path) -> None:
    settings = config(tmp_path, strategy="fsdp")
    held_out = {**settings["data"]["evaluation"]["held-out"], "name": str(tmp_path / "more.jsonl")}
    rows = (tmp_path / "rows.jsonl").read_text().splitlines()
    rows.insert(3, json.dumps({"text": "", "label": "b"}))
    (tmp_path / "more.jsonl").write_text("\n".join([*rows, json.dumps({"text": "", "label": "c"})]))
    settings["data"]["evaluation"] = {"held-out": held_out}
    for metrics, _ in in_world(2, _evaluated, settings):
        assert metrics["rougeL_fmeasure"] == pytest.approx(oracle[0]["rougeL_fmeasure"], rel=1e-6)
        assert metrics["exact_match"] == oracle[0]["exact_match"]


def test_an_encoder_and_decoder_answers(tmp_path: Path) -> None:
    [(metrics, answers)] = in_world(1, _evaluated, config(tmp_path, 40, task="seq2seq", strategy="single"))
    _checked(metrics, answers)
    refused = config(tmp_path, 1, task="seq2seq", strategy="fsdp")
    assert in_world(2, _refused, refused, ["encoder", "fsdp"]) == [True, True]


@pytest.mark.parametrize(
    ("ranks", "changes", "values"),
    [
        (2, {"parallel": {"strategy": "ddp", "pipeline": 2}}, ["parallel.pipeline", "2"]),
        (2, {"parallel": {"strategy": "ddp", "tensor": 2}}, ["parallel.tensor", "2"]),
        (1, {"model": {"kind": "transformer", "heads": 2, "width": 16, "layers": 1}}, ["transformers"]),
        (1, {"evaluation": {"generate": {"metrics": ["f1"]}}}, ["f1", "classification", "texts"]),
        (1, {"evaluation": {"metrics": ["bleu"]}}, ["bleu", "evaluation.generate.metrics"]),
        (1, {"evaluation": {"generate": {"metrics": [{"kind": "bleu", "arguments": {"gram": 1}}]}}}, ["bleu", "gram"]),
    ],
)
def test_what_cannot_be_generated_is_refused_before_training(
    ranks: int, changes: dict[str, Any], values: list[str], tmp_path: Path
) -> None:
    for found in in_world(ranks, _refused, {**config(tmp_path, strategy="single"), **changes}, values):
        assert found


def _refused(settings: dict[str, Any], values: list[str]) -> bool:
    with pytest.raises(ConfigError) as refused, lockstep.session(settings):
        pass
    return "evaluation." in str(refused.value) and gives(str(refused.value), *values)


def test_prompts_are_needed(tmp_path: Path) -> None:
    settings = config(tmp_path, 1, strategy="single")
    settings["data"]["train"].pop("label")  # it is the evaluation's, too
    with fails(ConfigError, "evaluation.generate", "data.evaluation.held-out", "label"), lockstep.session(settings):
        pass


def test_chunked_losses_have_no_logits(tmp_path: Path) -> None:
    settings = {**config(tmp_path), "memory": {"loss_chunk": 8}}
    with fails(ConfigError, "evaluation.generate", "memory.loss_chunk"):
        validate(settings)
