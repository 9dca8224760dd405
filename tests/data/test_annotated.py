"""Words with tags, contexts with answers, questions with choices, images, and classes with names become batches."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from kit.failures import fails

from lockstep.config.schema import HuggingFaceData
from lockstep.core.errors import ConfigError, UnusableSamples
from lockstep.core.protocols import Source
from lockstep.data.sources import open_source

pytest.importorskip("datasets")

SPECIAL = {"pad_token": "[PAD]", "cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]"}
PIECES = ["ada", "##s", "love", "lace", "wrote", "no", "##tes", "in", "london", "who", "?"]
IDS = {piece: number for number, piece in enumerate([*SPECIAL.values(), *PIECES])}
CLS, SEP, OFF = 1, 2, -100
BEYOND = 2**31 - 1


def ids(*pieces: str) -> list[int]:
    return [IDS[piece] for piece in pieces]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordPiece(IDS, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.BertProcessing(("[SEP]", SEP), ("[CLS]", CLS))
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=made, **SPECIAL).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def opened(tokenizer: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Source]:
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))

    def open_(task: str, rows: Any, class_names: tuple[str, ...] = (), **options: Any) -> Source:
        from datasets import Dataset

        place = tmp_path / f"rows{len(list(tmp_path.iterdir()))}"
        if isinstance(rows, Dataset):
            rows.save_to_disk(str(place))
        else:
            place = place.with_suffix(".jsonl")
            place.write_text("".join(json.dumps(row) + "\n" for row in rows))
        section = HuggingFaceData(kind="huggingface", name=str(place), **{"tokenizer": tokenizer, **options})
        return open_source(section, task=task, tokenizer=None, class_names=class_names)

    return open_


TAGGED = [
    {"words": ["adas", "wrote", "notes"], "tags": ["B-PER", "O", "O"]},
    {"words": ["london"], "tags": ["B-LOC"]},
    {"words": [], "tags": []},
]
TAGS = {"text": "words", "label": "tags"}


def test_a_tag_is_the_target_of_the_first_token_of_its_word(opened: Callable[..., Source]) -> None:
    source = opened("token-classification", TAGGED, **TAGS)
    assert source.facts.class_names == ("B-LOC", "B-PER", "O")
    batch = source.fetch(np.array([0, 1, 2]))
    assert batch.inputs["input_ids"].tolist() == [
        [CLS, *ids("ada", "##s", "wrote", "no", "##tes"), SEP],
        [CLS, *ids("london"), SEP, 0, 0, 0, 0],
        [CLS, SEP, 0, 0, 0, 0, 0],
    ]
    assert batch.targets.tolist() == [[OFF, 1, OFF, 2, 2, OFF, OFF], [OFF, 0, *5 * [OFF]], 7 * [OFF]]
    assert batch.tokens == 12
    cut = opened("token-classification", TAGGED, max_length=4, **TAGS).fetch(np.array([0]))
    assert cut.targets.tolist() == [[OFF, 1, OFF, OFF]]


def test_tags_may_be_numbers_or_class_labels_and_have_the_run_s_numbers(opened: Callable[..., Source]) -> None:
    from datasets import ClassLabel, Dataset, Features, List, Value

    numbered = [{"words": ["london", "in"], "tags": [4, -100]}]
    source = opened("token-classification", numbered, **TAGS)
    assert (source.facts.classes, source.facts.class_names) == (5, ())
    assert source.fetch(np.array([0])).targets.tolist() == [[OFF, 4, OFF, OFF]]
    features = Features({"words": List(Value("string")), "tags": List(ClassLabel(names=["O", "B-LOC", "B-PER"]))})
    labeled = Dataset.from_list([{"words": ["london"], "tags": ["B-LOC"]}], features=features)
    assert opened("token-classification", labeled, **TAGS).facts.class_names == ("O", "B-LOC", "B-PER")
    known = ("B-LOC", "B-PER", "O")
    source = opened("token-classification", labeled, known, **TAGS)
    assert (source.facts.class_names, source.fetch(np.array([0])).targets.tolist()) == (known, [[OFF, 0, OFF]])
    assert source.fingerprint != opened("token-classification", labeled, **TAGS).fingerprint


@pytest.mark.parametrize(
    ("task", "row", "options", "named"),
    [
        ("token-classification", {"words": ["in"], "tags": ["B-PRE"]}, {**TAGS, "class_names": ("O", "B-PER")},
         ("tags", "B-PRE", "B-PER")),
        ("token-classification", {"words": ["in"], "tags": [3]}, {**TAGS, "class_names": ("O", "B")}, ("tags", 3, 2)),
        ("token-classification", {"words": ["in"], "tags": [0.5]}, TAGS, ("tags", 0.5)),
        ("token-classification", {"words": ["in"], "tags": "O"}, TAGS, ("column tags", "token-classification")),
        ("token-classification", {"words": "in", "tags": ["O"]}, TAGS, ("column words", "in")),
        ("token-classification", {"words": ["in"], "tags": ["O"]}, {"text": "words"},
         ("token-classification", "label")),
        ("token-classification", {"words": ["in"], "tags": ["O"]}, {"text": "words", "label": "tag"}, ("tag", "tags")),
        ("question-answering", {"text": "a", "context": "b", "answers": "b"},
         {"text_pair": "context", "label": "answers"}, ("column answers", "answer_start")),
        ("question-answering", {"text": "a"}, {}, ("question-answering", "text_pair", "label")),
        ("multiple-choice", {"text": "a", "choices": ["b"], "label": 0},
         {"text_pair": "choices", "label": "label"}, ("label", "1 classes", "1 choices")),
        ("multiple-choice", {"text": "a", "choices": ["b", "c"], "label": 2},
         {"text_pair": "choices", "label": "label"}, ("label", "3 classes", "2 choices")),
        ("image-classification", {"text": "a", "label": 0}, {"label": "label"}, ("image-classification", "image")),
        ("causal-lm", {"text": "a", "b": "c"}, {"text_pair": ("text", "b")}, ("multiple-choice", "causal-lm")),
        ("masked-lm", {"image": "a"}, {"image": "image"}, ("image-classification", "masked-lm")),
        ("audio-classification", {"text": "a"}, {}, ("audio-classification", "custom")),
    ],
)  # fmt: skip
def test_data_of_another_form_is_refused(
    task: str, row: dict[str, Any], options: dict[str, Any], named: tuple[object, ...], opened: Callable[..., Source]
) -> None:
    with fails(ConfigError, *named):
        opened(task, [row], **options)


def test_a_sample_with_more_words_than_tags_is_named(opened: Callable[..., Source]) -> None:
    source = opened("token-classification", [*TAGGED, {"words": ["in", "london"], "tags": ["O"]}], **TAGS)
    with fails(UnusableSamples, "row 4", "2 words", "1 tags"):
        source.fetch(np.array([3]))


CONTEXT = "adas wrote notes in london"
ANSWERS = [
    {"question": "who?", "context": CONTEXT, "answers": {"text": ["wrote notes"], "answer_start": [5]}},
    {"question": "who", "context": "london", "answers": {"text": [], "answer_start": []}},
    {"question": "who", "context": CONTEXT, "answers": {"text": ["london"], "answer_start": [20]}},
    {"question": "who", "context": CONTEXT, "answers": {"text": ["notes"], "answer_start": [12]}},
]


def test_an_answer_becomes_a_span_of_tokens(opened: Callable[..., Source]) -> None:
    columns = {"text": "question", "text_pair": "context", "label": "answers"}
    source = opened("question-answering", ANSWERS, max_length=11, **columns)
    batch = source.fetch(np.array([0, 1, 2]))
    assert batch.inputs["input_ids"][0].tolist()[:4] == [CLS, *ids("who", "?"), SEP]
    start, end = batch.inputs["start_positions"].tolist(), batch.inputs["end_positions"].tolist()
    assert batch.inputs["input_ids"][0, start[0] : end[0] + 1].tolist() == ids("wrote", "no", "##tes")
    assert (start[1:], end[1:]) == ([0, 9], [0, 9])
    assert batch.inputs["input_ids"][2, 9].item() == IDS["london"]
    cut = opened("question-answering", ANSWERS, max_length=8, **columns).fetch(np.array([0, 2]))
    assert cut.inputs["start_positions"].tolist() == [BEYOND, BEYOND]
    with fails(UnusableSamples, "row 4", "notes", 12, "otes "):
        source.fetch(np.array([3]))


def test_choices_are_rows_of_a_sample(opened: Callable[..., Source]) -> None:
    lists = [{"text": "who", "choices": ["ada", "london"], "right": "B"}, {"text": "in", "choices": ["no", "love lace"],
             "right": "A"}]  # fmt: skip
    source = opened("multiple-choice", lists, text_pair="choices", label="right")
    batch = source.fetch(np.array([0, 1]))
    assert batch.inputs["input_ids"].tolist() == [
        [[CLS, *ids("who"), SEP, *ids("ada"), SEP, 0], [CLS, *ids("who"), SEP, *ids("london"), SEP, 0]],
        [[CLS, *ids("in"), SEP, *ids("no"), SEP, 0], [CLS, *ids("in"), SEP, *ids("love", "lace"), SEP]],
    ]
    assert batch.targets.tolist() == [1, 0]
    columns = [{"text": row["text"], "a": row["choices"][0], "b": row["choices"][1], "right": n} for n, row in
               enumerate(lists)]  # fmt: skip
    other = opened("multiple-choice", columns, text_pair=("a", "b"), label="right").fetch(np.array([0, 1]))
    assert torch.equal(other.inputs["input_ids"], batch.inputs["input_ids"])
    uneven = opened("multiple-choice", [*lists, {**lists[0], "choices": ["no"]}], text_pair="choices", label="right")
    with fails(UnusableSamples, "row 3", 2):
        uneven.fetch(np.array([2]))


def test_texts_and_lists_of_names_are_classes(opened: Callable[..., Source]) -> None:
    rows = [{"text": "ada", "label": "good", "topics": ["math", "art"]}, {"text": "in", "label": "bad", "topics": []}]
    source = opened("sequence-classification", rows, label="label")
    assert (source.facts.class_names, source.fetch(np.array([0, 1])).targets.tolist()) == (("bad", "good"), [1, 0])
    several = opened("sequence-classification", rows, label="topics")
    assert (several.facts.classes, several.facts.class_names) == (2, ("art", "math"))
    assert several.fetch(np.array([0, 1])).targets.tolist() == [[1.0, 1.0], [0.0, 0.0]]
    with fails(ConfigError, "label", "good", "Good"):
        opened("sequence-classification", rows, ("Good", "bad"), label="label")


def test_images_are_what_the_image_processor_makes_of_them(opened: Callable[..., Source], tmp_path: Path) -> None:
    from datasets import Dataset
    from PIL import Image
    from transformers import ViTImageProcessor

    processor = ViTImageProcessor(size={"height": 6, "width": 6})
    processor.save_pretrained(tmp_path / "processor")
    pixels = np.random.default_rng(0).integers(0, 255, (3, 8, 8), dtype=np.uint8)
    images = [Image.fromarray(each) for each in pixels]
    rows = Dataset.from_list([{"picture": image, "kind": kind} for image, kind in zip(images, "bab", strict=True)])
    options = {"image": "picture", "label": "kind", "tokenizer": str(tmp_path / "processor")}
    source = opened("image-classification", rows, **options)
    batch = source.fetch(np.array([0, 1]))
    expected = processor([image.convert("RGB") for image in images[:2]], return_tensors="pt")["pixel_values"]
    assert torch.equal(batch.inputs["pixel_values"], expected)
    assert (source.facts.class_names, batch.targets.tolist()) == (("a", "b"), [1, 0])
    with fails(ConfigError, "column kind", "images"):
        opened("image-classification", rows, **{**options, "image": "kind"})


def test_digits_are_images_for_transformers_models(opened: Callable[..., Source]) -> None:
    from lockstep.config.schema import Digits

    source = open_source(Digits(kind="digits"), task="image-classification", tokenizer=None)
    assert source.fetch(np.array([0])).inputs["pixel_values"].shape == (1, 1, 8, 8)
