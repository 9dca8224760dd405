"""The rows of a dataset of the datasets library with a tokenizer, and the source of their batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
from torch import Tensor

from lockstep.config.data_sections import CHAT_KEYS
from lockstep.config.schema import HuggingFaceData
from lockstep.core.errors import UnusableSamples
from lockstep.core.records import Batch, DataFacts
from lockstep.data.bad_samples import read_or_explain
from lockstep.data.class_labels import ClassLabels
from lockstep.data.columns import pair_columns
from lockstep.data.hub import check_texts, end_token, rows_identity, tokenizer_identity
from lockstep.data.order import Indices, fingerprint

FORMAT = 3
_FINGERPRINT_ROWS = 256
_NOT_CONTENT = (
    "name",
    "revision",
    "tokenizer",
    "split",
    "configuration",
    "train_on_prompt",
    "rejected",
    "desirable",
    "image",
)


class Texts:
    """The rows of a dataset and their tokenizer.

    Args:
        columns: The columns with a text each.
    """

    def __init__(self, rows: Any, tokenizer: Any, section: HuggingFaceData, columns: Sequence[str]) -> None:
        self.rows = rows
        self.tokenizer = tokenizer
        self.section = section
        self.where = f"dataset {section.name}, split {section.split}"
        self._of_text = columns

    def at(self, indices: Indices) -> dict[str, list[Any]]:
        """Return the columns of the rows at `indices`. Raises UnusableSamples for one without a text."""
        columns = self._at(indices)
        for column in self._of_text:
            check_texts(columns[column], indices + 1, column, self.where, UnusableSamples)
        return columns

    def before(self, indices: Indices) -> dict[str, list[Any]]:
        """Return the columns of the rows before those at `indices`; before the first is the last."""
        return self._at((indices - 1) % len(self.rows))

    def _at(self, indices: Indices) -> dict[str, list[Any]]:
        return cast("dict[str, list[Any]]", self.rows[indices.tolist()])

    def encoded(self, columns: dict[str, list[Any]], **options: Any) -> dict[str, Tensor]:
        """Return the tokenizer's tensors of the rows' texts, [samples, longest] each, as `padded`."""
        return self.padded(self.encoding(columns, **options))

    def encoding(self, columns: dict[str, list[Any]], **options: Any) -> Any:
        """Return the tokenizer's encoding of the rows' texts, as `encoded`."""
        pairs = [columns[pair] for pair in pair_columns(self.section)]
        return self.encoding_of(columns[self.section.text], *pairs, **options)

    def encoding_of(self, texts: list[Any], pairs: list[str] | None = None, **options: Any) -> Any:
        """Return the tokenizer's encoding of texts, truncated to `max_length`."""
        return self.tokenizer(texts, pairs, truncation=True, max_length=self.section.max_length, **options)

    def padded(self, encoding: Any, *, whole: bool = False) -> dict[str, Tensor]:
        """Return an encoding as tensors, padded on the right to the longest, or to `max_length` (`whole`)."""
        if not any(encoding["input_ids"]):  # only empty texts: a model still needs a position
            padding: dict[str, Any] = {"padding": "max_length", "max_length": 1}
        elif whole:
            padding = {"padding": "max_length", "max_length": self.section.max_length}
        else:
            padding = {"padding": "longest"}
        padded = dict(self.tokenizer.pad(encoding, padding_side="right", return_tensors="pt", **padding))
        padded["attention_mask"][:, 0] = 1  # an empty text has one valid position: a softmax over none is NaN
        return padded

    def fingerprint(self, kind: str) -> str:
        """Return a hash of rows spread over the dataset, the vocabulary and the options."""
        options = self.section.model_dump(exclude={*_NOT_CONTENT, *CHAT_KEYS})
        vocabulary = sorted(self.tokenizer.get_vocab().items())
        return fingerprint(kind, len(self.rows), self._sampled(), options, vocabulary)

    def _sampled(self) -> dict[str, list[Any]]:
        sampled = np.unique(np.linspace(0, len(self.rows) - 1, _FINGERPRINT_ROWS).astype(np.int64))
        return read_or_explain(self._at, sampled)

    def stream_key(self) -> str:
        """Return a hash of all that the documents' tokens depend on."""
        source = (rows_identity(self.rows), self.section.text, self._sampled()[self.section.text])
        end = end_token(self.tokenizer)
        return fingerprint("stream", FORMAT, *source, tokenizer_identity(self.tokenizer), end)


class TextSource:
    """A source with one text for each sample; `kind`, of its batches, is part of the fingerprint."""

    def __init__(
        self,
        texts: Texts,
        kind: str,
        batch: Callable[[Indices], Batch],
        *,
        classes: int | None = None,
        labels: ClassLabels | None = None,
        draws: bool = False,
    ) -> None:
        vocabulary, padding = len(texts.tokenizer), texts.tokenizer.pad_token_id
        pairs = texts.section.rejected is not None or texts.section.desirable is not None
        self.facts = DataFacts(len(texts.rows), None, vocabulary=vocabulary, padding=padding, pairs=pairs)
        if labels is not None:
            classes, kind = labels.size, kind + labels.identity
            is_number = labels.numbers is None and not labels.several
            self.facts = replace(self.facts, class_names=labels.names, numbers=is_number)
        self.facts = replace(self.facts, classes=classes)
        self.fingerprint = texts.fingerprint(kind)
        self.texts = texts
        self.draws = draws
        self.fetch = batch
