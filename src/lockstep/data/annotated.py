"""Batches of tasks with annotations: words with tags, contexts with answers, questions with choices, images.

    token-classification    words, tags                    input_ids          the tag at the first token of each word
    question-answering      question, context, answers     input_ids, start_positions, end_positions
    multiple-choice         text, choices, the right one   input_ids [samples, choices, longest]; the right one
    image-classification    image, class                   pixel_values       the class

An answer is a span of characters of its context, and becomes one of tokens. One that is not among the first
`max_length` tokens has no target; a question without an answer has the position of the tokenizer's cls token. The
library's loss compares all positions, padding included: contexts are padded to `max_length`, so that it doesn't depend
on how samples are batched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch

from lockstep.config.schema import HuggingFaceData
from lockstep.core.errors import ConfigError, UnusableSamples
from lockstep.core.records import IGNORED, Batch, DataFacts
from lockstep.data.bad_samples import read_or_explain
from lockstep.data.class_labels import ClassLabels, class_labels
from lockstep.data.columns import pair_columns
from lockstep.data.order import Indices, fingerprint
from lockstep.data.texts import Texts

_BEYOND = 2**31 - 1
"""The position of an answer without a target: behind every sequence."""
_SAMPLED_IMAGES = 16
Fetch = Callable[[Indices], Batch]


# --- words with tags ----------------------------------------------------------------------------------------------


def tagging(texts: Texts, labels: ClassLabels) -> Fetch:
    """Return what makes batches of words with tags. Raises ConfigError if a sample's text is no list of words."""
    _refuse_slow(texts)
    words = texts.rows[0][texts.section.text]
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ConfigError(
            f"column {texts.section.text} has {words!r:.60}, but token-classification needs lists of words"
        )
    return partial(_tagged, texts, labels)


def _tagged(texts: Texts, labels: ClassLabels, indices: Indices) -> Batch:
    columns, label = texts.at(indices), texts.section.label
    assert label is not None
    assert labels.numbers is not None
    for index, words, tags in zip(indices, columns[texts.section.text], columns[label], strict=True):
        if len(words or ()) != len(tags):
            why = f"has {len(words or ())} words and {len(tags)} tags; correct or remove it"
            raise UnusableSamples(f"{texts.where}, row {index + 1:,} {why}")
    encoding = texts.encoding_of(columns[texts.section.text], is_split_into_words=True)
    inputs = texts.padded(encoding)
    targets = np.full(inputs["input_ids"].shape, IGNORED)
    for row, tags in enumerate(columns[label]):
        previous = None
        for place, word in enumerate(encoding.word_ids(row)):
            if word is not None and word != previous:
                targets[row, place] = labels.numbers[tags[word]]
            previous = word
    return Batch(inputs, torch.from_numpy(targets), len(indices), int(inputs["attention_mask"].sum()))


# --- contexts with answers ----------------------------------------------------------------------------------------


def answering(texts: Texts) -> Fetch:
    """Return what makes batches of questions with answers. Raises ConfigError for answers of another form."""
    _refuse_slow(texts)
    answers = texts.rows[0][texts.section.label]
    if not isinstance(answers, dict) or not {"text", "answer_start"} <= answers.keys():
        form = "a text and an answer_start (the number of its first character), as in SQuAD"
        raise ConfigError(f"column {texts.section.label} has {answers!r:.60}, but question-answering needs {form}")
    return partial(_answered, texts)


def _answered(texts: Texts, indices: Indices) -> Batch:
    columns = texts.at(indices)
    encoding = texts.encoding(columns, return_offsets_mapping=True)
    offsets, (context,) = encoding.pop("offset_mapping"), pair_columns(texts.section)
    spans = []
    for row, (text, answers) in enumerate(zip(columns[context], columns[str(texts.section.label)], strict=True)):
        start, answer = (np.atleast_1d(answers[key])[:1].tolist() for key in ("answer_start", "text"))
        if not answer:
            ids = encoding["input_ids"][row]
            spans.append(2 * [ids.index(cls) if (cls := texts.tokenizer.cls_token_id) in ids else 0])
            continue
        end = start[0] + len(answer[0])
        if text[start[0] : end] != answer[0]:
            why = (
                f"has the answer {answer[0]!r:.60} at {start[0]:,}, where its context has {text[start[0] : end]!r:.60}"
            )
            raise UnusableSamples(f"{texts.where}, row {indices[row] + 1:,} {why}; correct or remove it")
        spans.append(_span(encoding.sequence_ids(row), offsets[row], start[0], start[0] + len(answer[0].rstrip())))
    inputs = texts.padded(encoding, whole=True)
    tokens = int(inputs["attention_mask"].sum())
    inputs["start_positions"], inputs["end_positions"] = torch.tensor(spans).unbind(1)
    return Batch(inputs, None, len(indices), tokens)


def _span(parts: Sequence[int | None], offsets: Sequence[tuple[int, int]], start: int, end: int) -> list[int]:
    """Return the first and the last token of the characters of an answer; beyond the sequence if it is cut off."""
    inside = [
        place
        for place, (part, (first, last)) in enumerate(zip(parts, offsets, strict=True))
        if part == 1 and first < end and last > start
    ]
    is_whole = bool(inside) and offsets[inside[-1]][1] >= end
    return [inside[0], inside[-1]] if is_whole else [_BEYOND, _BEYOND]


# --- choices ------------------------------------------------------------------------------------------------------


def choosing(texts: Texts, labels: ClassLabels) -> Fetch:
    """Return what makes batches of texts with choices. Raises ConfigError for a label without a choice."""
    first = _choices(texts.section, {key: [value] for key, value in texts.rows[0].items()})[0]
    size = len(first) if isinstance(first, list) else 0
    if size < 2 or labels.numbers is None or labels.several or labels.size > size:
        why = f"column {texts.section.label} has {labels.size} classes, and the first sample {size} choices"
        raise ConfigError(f"{why}; multiple-choice needs the number of one of two or more choices, from 0")
    return partial(_chosen, texts, labels, size)


def _choices(section: HuggingFaceData, columns: dict[str, list[Any]]) -> list[Any]:
    lists = [columns[name] for name in pair_columns(section)]
    return lists[0] if isinstance(section.text_pair, str) else [list(each) for each in zip(*lists, strict=True)]


def _chosen(texts: Texts, labels: ClassLabels, size: int, indices: Indices) -> Batch:
    columns, label = texts.at(indices), texts.section.label
    assert label is not None
    choices = _choices(texts.section, columns)
    for index, each in zip(indices, choices, strict=True):
        if not isinstance(each, list) or len(each) != size or not all(isinstance(choice, str) for choice in each):
            why = f"has the choices {each!r:.60}, but needs {size} texts, as the first row; correct or remove it"
            raise UnusableSamples(f"{texts.where}, row {index + 1:,} {why}")
    repeated = [text for text in columns[texts.section.text] for _ in range(size)]
    inputs = texts.padded(texts.encoding_of(repeated, [choice for each in choices for choice in each]))
    tokens = int(inputs["attention_mask"].sum())
    inputs = {name: value.view(len(indices), size, -1) for name, value in inputs.items()}
    return Batch(inputs, labels.tensor(columns[label]), len(indices), tokens)


# --- images -------------------------------------------------------------------------------------------------------


class ImageSource:
    """Images [samples, 3, height, width] as the model's image processor makes them; the targets are their classes."""

    draws = False

    def __init__(self, rows: Any, processor: Any, section: HuggingFaceData, class_names: Sequence[str]) -> None:
        assert section.image is not None
        assert section.label is not None
        self._rows, self._processor, self._section = rows, processor, section
        where = f"dataset {section.name}, split {section.split}"
        if getattr(rows.features[section.image], "dtype", "") != "PIL.Image.Image":
            why = f"{rows.features[section.image]}, and images are needed (datasets.Image); such as a folder of files"
            raise ConfigError(f"column {section.image} of {where} has {why}")
        self._labels = class_labels(rows, section.label, where, class_names)
        names, classes = self._labels.names, self._labels.size
        self.facts = DataFacts(len(rows), None, classes=classes, class_names=names)
        sampled = np.unique(np.linspace(0, len(rows) - 1, _SAMPLED_IMAGES).astype(np.int64))
        content = read_or_explain(self.fetch, sampled)
        pixels, settings = dict(content.inputs)["pixel_values"].numpy(), processor.to_dict()
        kind = "images" + self._labels.identity
        self.fingerprint = fingerprint(
            kind, len(rows), pixels, content.targets.tolist(), sorted(settings.items(), key=str)
        )

    def fetch(self, indices: Indices) -> Batch:
        columns = self._rows[indices.tolist()]
        images = [image.convert("RGB") for image in columns[self._section.image]]
        pixels = self._processor(images, return_tensors="pt")["pixel_values"]
        return Batch(
            {"pixel_values": pixels}, self._labels.tensor(columns[self._section.label]), len(indices), len(indices)
        )


def _refuse_slow(texts: Texts) -> None:
    if not texts.tokenizer.is_fast:
        raise ConfigError(
            f"{type(texts.tokenizer).__name__} doesn't tell which characters a token has; take a fast one"
        )
