"""Datasets of the datasets library become batches for each task. Rows and tokenizers are tiny and local."""

import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from kit.failures import fails, gives

from lockstep.config.schema import Config, HuggingFaceData
from lockstep.core import hub
from lockstep.core.errors import ConfigError, UnusableSamples
from lockstep.core.records import LANGUAGE_MODEL
from lockstep.data import huggingface, noise
from lockstep.data.prepare import prepare
from lockstep.data.sources import open_source
from lockstep.models.attention_masks import masks_of_host

WORDS = ["the", "a", "cat", "dog", "sat", "ran", "on", "mat", "fast", "slow", "and"]
ROWS = [
    {"text": "the cat sat on the mat", "label": 0, "answer": "a dog ran"},
    {"text": "", "label": 1, "answer": "a cat"},
    {"text": "a dog ran fast and slow on a mat", "label": 2, "answer": "cat"},
    {"text": "cat", "label": 0, "answer": "the dog sat"},
]
INDICES = np.array([3, 0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    def save(name: str, special: dict[str, str], template: str | None) -> None:
        vocabulary = {word: number for number, word in enumerate([*special.values(), *WORDS])}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=special["unk_token"]))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        if template:
            ids = [(word, vocabulary[word]) for word in ("[CLS]", "[SEP]")]
            tokenizer.post_processor = processors.TemplateProcessing(single=template, special_tokens=ids)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(path / name)

    path = tmp_path_factory.mktemp("hf")
    save("gpt", {"eos_token": "<eos>", "unk_token": "<unk>"}, None)
    bert = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "mask_token": "[MASK]"}
    save("bert", {**bert, "unk_token": "[UNK]"}, "[CLS] $A [SEP]")
    (path / "rows.jsonl").write_text("\n".join(json.dumps(row) for row in ROWS))
    return path


@pytest.fixture
def opened(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))

    def open_(tokenizer_name: str, task: str | None, **options):
        options = {"name": str(folder / "rows.jsonl"), "tokenizer": str(folder / tokenizer_name)} | options
        return open_source(HuggingFaceData(kind="huggingface", **options), task=task, tokenizer=None)

    return open_


def words(*text: str) -> list[int]:
    """Return ids of the gpt tokenizer, which has two special tokens."""
    return [WORDS.index(word) + 2 for word in " ".join(text).split()]


def test_padding_is_never_a_target_even_if_it_is_the_end_token(opened):
    source = opened("gpt", "causal-lm")
    assert (source.facts.vocabulary, source.facts.padding, source.facts.samples) == (13, 0, 4)
    batch = source.fetch(INDICES)
    first, second = words("cat"), words("the cat sat on the mat")
    assert batch.inputs["input_ids"].tolist() == [first + [0] * 5, second]
    assert batch.inputs["attention_mask"].tolist() == [[1, 0, 0, 0, 0, 0], [1] * 6]
    assert batch.targets.tolist() == [first + [-100] * 5, second]
    assert batch.tokens == 7


def test_targets_of_lockstep_language_models_are_the_next_ids(opened):
    batch = opened("gpt", None).fetch(INDICES)
    second = words("the cat sat on the mat")
    assert batch.inputs["tokens"].tolist()[1] == second
    assert batch.targets.tolist() == [[-100] * 6, [*second[1:], -100]]


def test_an_empty_text_has_one_position(opened):
    batch = opened("gpt", "causal-lm").fetch(np.array([1]))
    assert batch.inputs["input_ids"].tolist() == [[0]]
    assert batch.inputs["attention_mask"].tolist() == [[1]]


def test_packed_documents_fill_every_sample(opened):
    stream = [token for row in ROWS for token in [*words(row["text"]), 0]]
    source = opened("gpt", "causal-lm", packed=True, max_length=4)
    assert source.facts.samples == (len(stream) - 1) // 4
    assert source.facts.bytes_per_token == sum(len(row["text"]) for row in ROWS) / len(stream)
    assert source.fetch(np.array([1])).inputs["input_ids"].tolist() == [stream[4:8]]
    assert opened("gpt", None, packed=True, max_length=4).fetch(np.array([1])).targets.tolist() == [stream[5:9]]


def test_packed_documents_are_tokenized_once_for_each_tokenizer_column_and_content(
    opened, folder, tmp_path, monkeypatch
):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    tokenized, texts_of = [], huggingface.texts_of
    monkeypatch.setattr(huggingface, "texts_of", lambda *given: tokenized.append(1) or texts_of(*given))
    first = opened("gpt", "causal-lm", packed=True, max_length=4)
    again, longer = (opened("gpt", None, packed=True, max_length=length) for length in (4, 5))
    assert len(tokenized) == 1
    assert first.fingerprint == again.fingerprint != longer.fingerprint
    opened("gpt", None, packed=True, max_length=4, text="answer")
    opened("bert", None, packed=True, max_length=4)
    opened("gpt", None, packed=True, max_length=4, split="train[:3]")
    assert len(tokenized) == 4
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "the cat sat on the mat"}))
    opened("gpt", None, packed=True, max_length=4, name=str(tmp_path / "rows.jsonl"))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "the dog sat on the mat"}))
    opened("gpt", None, packed=True, max_length=4, name=str(tmp_path / "rows.jsonl"))
    assert len(tokenized) == 6


def test_packed_documents_with_another_end_token_are_tokenized_again(opened, folder, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    other = tmp_path / "other"
    shutil.copytree(folder / "gpt", other)
    settings = json.loads((other / "tokenizer_config.json").read_text())
    (other / "tokenizer_config.json").write_text(json.dumps(settings | {"eos_token": "cat"}))
    for name, end in (("gpt", 0), (str(other), words("cat")[0])):
        source = opened(name, "causal-lm", packed=True, max_length=4)
        stream = [token for row in ROWS for token in [*words(row["text"]), end]]
        tokens = source.fetch(np.arange(source.facts.samples)).inputs["input_ids"].flatten().tolist()
        assert tokens == stream[: len(tokens)]


def test_as_many_packed_documents_as_are_tokenized_at_once(opened, tmp_path, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("lockstep.data.prepare._BATCH", len(ROWS))
    assert opened("gpt", "causal-lm", packed=True, max_length=4).facts.samples > 0


PACKED = {
    "texts": {"packed": "whole"},
    "prompts": {"packed": True, "label": "answer"},
    "prompts, too": {"packed": True, "label": "answer", "train_on_prompt": True},
}


def _losses(model, source, indices) -> tuple[float, torch.Tensor, int]:
    """The sum of losses over the targets of samples, its gradient, and the number of targets."""
    model.zero_grad()
    batch = source.fetch(indices)
    with masks_of_host(removed=False, packed=True):
        logits = model(**batch.inputs, use_cache=False).logits[:, :-1]
    targets = batch.targets[:, 1:]
    loss = torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=-100, reduction="sum"
    )
    loss.backward()
    gradient = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
    return loss.item(), gradient, int((targets != -100).sum())


@pytest.mark.parametrize("tokenizer", ["gpt", "bert"])
@pytest.mark.parametrize("keys", PACKED.values(), ids=PACKED)
def test_packed_prompts_and_whole_texts_have_the_losses_of_separate_ones(
    keys, tokenizer, opened, monkeypatch, tmp_path
):
    from transformers import AutoModelForCausalLM, LlamaConfig

    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    alone = opened(tokenizer, "causal-lm", max_length=12, **{**keys, "packed": False})
    packed = opened(tokenizer, "causal-lm", max_length=12, **keys)
    assert packed.facts.samples < alone.facts.samples == len(ROWS)
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**sizes, num_attention_heads=2)).double()
    expected, wanted, count = _losses(model, alone, np.arange(len(ROWS)))
    loss, gradient, same = _losses(model, packed, np.arange(packed.facts.samples))
    assert (same, loss) == (count, pytest.approx(expected, rel=1e-9))
    assert (gradient - wanted).norm() <= 1e-9 * wanted.norm()
    batch = packed.fetch(np.arange(packed.facts.samples))
    assert (batch.targets[batch.inputs["position_ids"] == 0] == -100).all()
    again = opened(tokenizer, "causal-lm", max_length=12, **keys)
    assert (again.fingerprint, batch.tokens) == (packed.fingerprint, packed.facts.tokens)
    rows = [row for index in range(packed.facts.samples) for row in packed.rows_of(index)]
    assert len(set(rows)) == len(rows) == len(packed.lengths)


@pytest.mark.parametrize(
    ("keys", "longest", "cut"),
    [
        (PACKED["prompts"], 11, 0),
        (PACKED["prompts"], 10, 1),
        (PACKED["prompts"], 9, 2),
        (PACKED["texts"], 9, 0),
        (PACKED["texts"], 8, 1),
    ],
)
def test_packed_texts_that_are_cut_are_counted(keys, longest, cut, opened, monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    source = opened("gpt", "causal-lm", max_length=longest, **keys)
    told = f"{cut} longer than max_length {longest}: cut"
    assert [told in text for text in (" ".join(source.changes), caplog.text)] == [cut > 0] * 2


def test_rows_that_cannot_be_packed_are_named(opened, monkeypatch, tmp_path):
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    for task in (None, LANGUAGE_MODEL):
        with fails(ConfigError, "packed"):
            opened("gpt", task, packed="whole")
    with fails(ConfigError, "packed"):
        opened("bert", "sequence-classification", packed=True, label="label")
    (tmp_path / "rows.jsonl").write_text('{"text": "a cat"}\n{"text": null}\n')
    with fails(ConfigError, "row 2", "column text"):
        opened("gpt", "causal-lm", packed="whole", name=str(tmp_path / "rows.jsonl"))


def _rows_with(value: object, suffix: str, folder: Path) -> Path:
    import pyarrow
    from pyarrow import csv, parquet

    file = folder / f"rows{suffix}"
    if suffix == ".json":
        file.write_text("\n".join(json.dumps({"text": text}) for text in ("a cat", "a dog", value)))
        return file
    table = pyarrow.table({"text": ["a cat", "a dog", value], "label": [0, 1, 2]})
    csv.write_csv(table, file) if suffix == ".csv" else parquet.write_table(table, file)
    return file


@pytest.mark.parametrize("suffix", [".json", ".csv", ".parquet"])
def test_a_row_without_a_text_is_named(suffix, opened, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    file = _rows_with(None, suffix, tmp_path)
    with fails(ConfigError, f"{file}, row 3", "column text"):
        prepare([str(file)], tmp_path / "out", tokenizer="bytes")
    with fails(ConfigError, f"dataset {file}, split train, row 3", "column text"):
        opened("gpt", "causal-lm", packed=True, max_length=4, name=str(file))
    source = opened("gpt", "causal-lm", name=str(file))
    assert source.fetch(np.array([0, 1])).samples == 2
    with pytest.raises(UnusableSamples, match="row 3 has no text"):
        source.fetch(np.array([0, 2]))
    if suffix != ".json":
        with fails(ConfigError, "row 1", 0, "column label"):
            prepare([str(file)], tmp_path / "out", tokenizer="bytes", column="label")


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_a_row_without_a_class_is_named_before_its_column_is_taken_for_numbers(suffix, opened, tmp_path):
    import pyarrow
    from pyarrow import csv, parquet

    file = tmp_path / f"rows{suffix}"
    table = pyarrow.table({"text": ["a cat", "a dog", "a mat"], "label": [0, None, 2]})
    csv.write_csv(table, file) if suffix == ".csv" else parquet.write_table(table, file)
    with fails(ConfigError, "row 2", "column label"):
        opened("bert", "sequence-classification", name=str(file), label="label")


def test_fetch_tokenizes_what_is_packed(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    train = {"kind": "huggingface", "name": str(folder / "rows.jsonl"), "tokenizer": str(folder / "gpt")}
    config = {
        "run": {"steps": 1},
        "model": {"kind": "transformer"},
        "data": {"train": {**train, "packed": True, "max_length": 4}},
    }
    [line] = huggingface.fetch_tokens(Config.model_validate(config))
    assert gives(line, "4 samples", "4 tokens")
    assert [file.suffix for file in (tmp_path / "cache" / "packed").iterdir()].count("") == 1


def test_classified_texts_are_padded_to_the_batchs_longest(opened):
    source = opened("bert", "sequence-classification", label="label")
    assert source.facts.classes == 3
    batch = source.fetch(INDICES)
    assert batch.inputs["input_ids"].shape == (2, 8)
    assert batch.targets.tolist() == [0, 0]
    own = opened("bert", None, label="label").fetch(INDICES)
    assert own.inputs["mask"].dtype == torch.bool
    assert torch.equal(own.inputs["tokens"], batch.inputs["input_ids"])


def test_samples_are_truncated_to_max_length(opened):
    assert opened("bert", "masked-lm", max_length=5).fetch(INDICES).inputs["input_ids"].shape == (2, 5)


def test_masks_hide_words_and_depend_only_on_the_sample(opened):
    source = opened("bert", "masked-lm", mask_probability=0.5)
    assert source.draws
    plain = opened("bert", "masked-lm", mask_probability=0.0).fetch(np.arange(4))
    assert (plain.targets == -100).all()
    hidden = total = masked = 0
    for epoch in range(200):
        noise.use_epoch(epoch * 7919)
        batch = source.fetch(np.arange(4))
        ids, chosen = plain.inputs["input_ids"], batch.targets != -100
        assert torch.equal(batch.targets[chosen], ids[chosen])
        assert not (chosen & (ids < 5)).any()
        assert torch.equal(batch.inputs["input_ids"][~chosen], ids[~chosen])
        hidden, total = hidden + int(chosen.sum()), total + int((ids >= 5).sum())
        masked += int((batch.inputs["input_ids"][chosen] == 3).sum())
        alone = source.fetch(np.array([0]))
        assert torch.equal(alone.targets[0], batch.targets[0, : alone.targets.shape[1]])
    assert abs(hidden / total - 0.5) < 0.03
    assert abs(masked / hidden - (0.8 + 0.1 / 16)) < 0.03


def test_only_the_completion_of_a_prompt_is_a_target(opened):
    first = [*words("cat"), *words("the dog sat"), 0]
    second = [*words("the cat sat on the mat"), *words("a dog ran"), 0]
    batch = opened("gpt", "causal-lm", label="answer").fetch(INDICES)
    assert batch.inputs["input_ids"].tolist() == [[*first, *[0] * 5], second]
    assert batch.inputs["attention_mask"].sum(1).tolist() == [5, 10]
    assert batch.targets.tolist() == [[-100, *first[1:], *[-100] * 5], [*[-100] * 6, *second[6:]]]
    assert batch.tokens == 15
    whole = opened("gpt", "causal-lm", label="answer", train_on_prompt=True)
    assert whole.fetch(INDICES).targets.tolist() == [[*first, *[-100] * 5], second]
    assert whole.fingerprint != opened("gpt", "causal-lm", label="answer").fingerprint
    assert whole.fingerprint != opened("gpt", "causal-lm").fingerprint
    own = opened("gpt", "language-model", label="answer").fetch(INDICES)
    assert own.inputs["tokens"].tolist() == batch.inputs["input_ids"].tolist()
    assert own.targets[:, :-1].tolist() == batch.targets[:, 1:].tolist()
    assert own.targets[:, -1].tolist() == [-100, -100]


def test_a_prompt_is_truncated_before_its_completion(opened):
    batch = opened("gpt", "causal-lm", label="answer", max_length=6).fetch(np.array([0]))
    assert batch.inputs["input_ids"].tolist() == [[*words("the mat"), *words("a dog ran"), 0]]
    batch = opened("gpt", "causal-lm", label="answer", max_length=3).fetch(np.array([0]))
    assert batch.inputs["input_ids"].tolist() == [words("mat a dog")]
    assert batch.targets.tolist() == [[-100, *words("a dog")]]
    begun = opened("bert", "causal-lm", label="answer", max_length=6).fetch(np.array([0]))
    assert begun.inputs["input_ids"].tolist() == [[1, *[token + 3 for token in words("mat a dog ran")], 2]]


def test_labels_can_be_numbers_or_several_classes(opened, folder):
    (folder / "scores.jsonl").write_text(json.dumps({"text": "cat", "score": 0.5, "tags": [0, 1, 1]}) + "\n")
    task, name = "sequence-classification", str(folder / "scores.jsonl")
    single = opened("bert", task, name=name, label="score")
    assert (single.facts.classes, single.fetch(np.array([0])).targets.tolist()) == (1, [0.5])
    several = opened("bert", task, name=name, label="tags")
    assert (several.facts.classes, several.fetch(np.array([0])).targets.tolist()) == (3, [[0.0, 1.0, 1.0]])


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("masked-lm", {"label": "answer"}, "label answer: masked-lm hides tokens of `text`"),
        (None, {"label": "label", "packed": True}, "packed is for language models, but a classifier"),
        ("causal-lm", {"label": "label"}, "column label has 0, a int; text is needed"),
        ("causal-lm", {"label": "answer", "text_pair": "text"}, "text_pair text and label, .* exclude each other"),
        ("causal-lm", {"text_pair": "answer", "packed": True}, "text_pair answer and packed exclude each other"),
        ("causal-lm", {"train_on_prompt": True}, "train_on_prompt is for .* this is causal-lm without `label`"),
        ("seq2seq", {"label": "answer", "train_on_prompt": True}, "train_on_prompt is for .* this is seq2seq; remove"),
        ("causal-lm", {"mask_probability": 0.2}, "mask_probability is for masked-lm, but this is causal-lm"),
        ("audio-classification", {"label": "label"}, "batches for causal-lm, .* made for audio-classification"),
    ],
)
def test_options_that_would_be_ignored_are_refused(opened, task, options, message):
    with pytest.raises(ConfigError, match=message):
        opened("gpt", task, **options)


def test_chat_messages_are_refused_as_text(opened, folder):
    (folder / "chat.jsonl").write_text(json.dumps({"text": [{"role": "user", "content": "cat"}]}) + "\n")
    with fails(ConfigError, "column text", "messages: text"):
        opened("gpt", "causal-lm", name=str(folder / "chat.jsonl"))


def test_a_target_text_becomes_the_targets(opened):
    batch = opened("gpt", "seq2seq", label="answer").fetch(np.array([0, 1]))
    expected = [words("a dog ran"), [*words("a cat"), -100]]
    assert batch.targets.tolist() == expected


def test_slices_of_files_and_saved_datasets(opened, folder, tmp_path):
    assert opened("gpt", "causal-lm", split="train[1:3]").facts.samples == 2
    from datasets import Dataset, DatasetDict

    rows = Dataset.from_list(ROWS)
    DatasetDict({"train": rows, "validation": rows.select([2])}).save_to_disk(str(tmp_path / "saved"))
    saved = {"name": str(tmp_path / "saved")}
    assert opened("gpt", "causal-lm", **saved, split="validation").facts.samples == 1
    half = opened("gpt", "causal-lm", **saved, split="train[:50%]")
    assert half.facts.samples == 2
    assert half.fingerprint == opened("gpt", "causal-lm", split="train[:2]").fingerprint
    assert half.fingerprint != opened("gpt", "causal-lm", split="train[2:]").fingerprint


def test_data_that_does_not_suit_the_task_is_refused(opened, tmp_path):
    for arguments, message in [
        ({"task": "causal-lm", "text": "txt"}, "no column txt; did you mean text"),
        ({"task": "seq2seq"}, "seq2seq needs `label`"),
        ({"task": "masked-lm", "tokenizer_": "gpt"}, "needs a tokenizer with a mask token"),
        ({"task": "masked-lm", "packed": True}, "needs separate samples; remove it"),
        ({"task": "causal-lm", "name": str(tmp_path / "none.jsonl")}, "there is no file or folder"),
        ({"task": "causal-lm", "split": "test"}, "split test, can't be read"),
    ]:
        with pytest.raises(ConfigError, match=message):
            opened(arguments.pop("tokenizer_", "bert"), arguments.pop("task"), **arguments)


@pytest.fixture
def unreachable(monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_HUB_OFFLINE", "")  # recorded by monkeypatch, which undoes what the code sets
    monkeypatch.delenv("HF_HUB_OFFLINE")
    hub.is_connected.cache_clear()
    yield
    hub.is_connected.cache_clear()


def test_a_name_that_is_not_cached_fails_immediately_without_a_network(opened, unreachable):
    import datasets.config
    import huggingface_hub.constants

    before = datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE
    try:
        start = time.monotonic()
        with fails(ConfigError, "surely/not-cached", "lockstep data fetch RECIPE"):
            opened("gpt", "causal-lm", name="surely/not-cached")
        with fails(ConfigError, "tokenizer surely/not-cached", "lockstep data fetch RECIPE"):
            opened("gpt", "causal-lm", tokenizer="surely/not-cached")
        assert time.monotonic() - start < 10
    finally:
        datasets.config.HF_HUB_OFFLINE, huggingface_hub.constants.HF_HUB_OFFLINE = before


def test_preparing_with_a_tokenizer_of_the_transformers_library(folder, tmp_path):
    headers = prepare(
        [str(folder / "rows.jsonl")], tmp_path / "out", tokenizer=str(folder / "gpt"), column="answer", held_out=4
    )
    assert np.fromfile(tmp_path / "out/train.tokens", np.uint16).tolist() == [
        token for row in ROWS[:3] for token in [*words(row["answer"]), 0]
    ]
    assert headers["train"].vocabulary == 13
    assert headers["held-out"].documents == 1
