"""Data sets of the datasets library as batches for a task.

    rows --> texts --> tokenizer --> padded to the batch's longest, or packed into full samples

                              inputs                           targets
    causal-lm                 input_ids, attention_mask        the ids themselves (the objective shifts them); with a
                                                               label column, those of the completion alone
    masked-lm                 the same, some ids hidden        the hidden ids
    sequence-classification   the same                         classes [samples]; numbers; [samples, classes]
    seq2seq                   the same                         the ids of the target text
    language-model (ours)     tokens                           the next ids; of a label column, too
    none (our own models)     tokens, mask                     classes if there is a label column, else the next ids

-100 is no target: padding never is one.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.config.schema import HuggingFaceData
from lockstep.core.errors import ConfigError
from lockstep.core.protocols import Source
from lockstep.core.records import Batch, DataFacts
from lockstep.data import noise, windows
from lockstep.data.hub import check_columns, end_token, load_rows, load_tokenizer
from lockstep.data.order import Indices
from lockstep.data.sources import LANGUAGE_MODEL
from lockstep.data.unreadable import read_or_explain

_IGNORED = -100
_COMPLETED = ("causal-lm", LANGUAGE_MODEL)
_NEEDS_LABEL = {"sequence-classification": "the class", "seq2seq": "the target text"}
_FINGERPRINT_ROWS = 256


def open_huggingface(section: HuggingFaceData, *, task: str | None, tokenizer: str | None) -> Source:
    """Return the source of a data set's rows.

    Raises:
        ConfigError: data or tokenizer are missing, or don't suit the task.
    """
    name = section.tokenizer or tokenizer
    if name is None:
        raise ConfigError("data of kind huggingface needs a `tokenizer`: a folder or hub name; the model has none")
    _check_options(section, task)
    rows = load_rows(section.name, section.configuration, section.split)
    columns = [column for column in (section.text, section.text_pair, section.label) if column is not None]
    check_columns(rows, columns)
    if len(rows) == 0:
        raise ConfigError(f"data set {section.name}, split {section.split}, is empty")
    text_columns = [section.text, section.text_pair]
    text_columns += [section.label] if task in _COMPLETED or task == "seq2seq" else []
    _check_texts(rows, [column for column in text_columns if column is not None])
    texts = Texts(rows.select_columns(columns), load_tokenizer(name), section)
    own = task in (None, LANGUAGE_MODEL)
    if section.packed:
        return _packed(texts, aligned=not own)
    match task, section.label:
        case (("causal-lm" | "language-model"), str(label)):
            kind = "prompt, loss" if section.train_on_prompt else "prompt"
            return TextSource(texts, kind, Completions(texts, label, own=own).batch)
        case "causal-lm", _:
            return TextSource(texts, "causal-lm", partial(_causal, texts))
        case "masked-lm", _:
            if texts.tokenizer.mask_token_id is None:
                raise ConfigError("masked-lm needs a tokenizer with a mask token; this one has none")
            return TextSource(texts, "masked-lm", partial(_masked, texts), draws=True)
        case "seq2seq", str(label):
            return TextSource(texts, "seq2seq", partial(_translated, texts, label))
        case _, str(label):
            dtype = torch.int64 if own else _label_dtype(rows[0][label])
            classes = _num_classes(rows, label) if dtype is torch.int64 else _num_outputs(rows, label)
            return TextSource(texts, "classification", partial(_classified, texts, label, dtype, own), classes=classes)
    return TextSource(texts, "next-token", partial(_next_token, texts))


def _check_options(section: HuggingFaceData, task: str | None) -> None:
    """Raise ConfigError if something is asked for that the task doesn't know, or lacks."""
    what = task or "a model of your own"
    if task in _NEEDS_LABEL and section.label is None:
        raise ConfigError(f"{task} needs `label`, the name of the column with {_NEEDS_LABEL[task]}")
    if task == "masked-lm" and section.label is not None:
        raise ConfigError(
            f"label {section.label}: masked-lm hides tokens of `text`, and these are its targets; leave it out"
        )
    if section.packed and section.label is not None and task in _COMPLETED:
        raise ConfigError(
            "packed joins documents, and a prompt with its completion stays by itself; leave packed or label out"
        )
    if section.packed and (task not in (None, *_COMPLETED) or section.label is not None):
        raise ConfigError(
            f"packed joins documents for language models; {task or 'a classifier'} needs each sample by itself: "
            "packed can be false"
        )
    if section.text_pair is not None and (section.packed or (task in _COMPLETED and section.label is not None)):
        other = "packed" if section.packed else "label, the column with completions,"
        raise ConfigError(f"text_pair {section.text_pair} and {other} don't go together; leave one out")
    if section.train_on_prompt and (task not in _COMPLETED or section.label is None):
        raise ConfigError(
            f"train_on_prompt is for language models with prompts (`text`) and completions (`label`), and this is "
            f"{what}{'' if section.label else ' without `label`'}; leave it out"
        )
    usual = type(section).model_fields["mask_probability"].default  # which the config that a run records has, too
    if section.mask_probability != usual and task != "masked-lm":
        raise ConfigError(f"mask_probability is for masked-lm, and this is {what}; leave it out")


def _check_texts(rows: Any, columns: list[str]) -> None:
    """Raise ConfigError if a column has something else."""
    for column in columns:
        value = rows[0][column]
        if isinstance(value, str):
            continue
        if isinstance(value, list) and value and isinstance(value[0], dict):
            why = "messages; write them out as text first, by the tokenizer's apply_chat_template"
        else:
            why = f"{value!r:.60}, a {type(value).__name__}; text is needed"
        raise ConfigError(f"column {column} has {why}")


class Texts:
    """Rows and the tokenizer that reads them."""

    def __init__(self, rows: Any, tokenizer: Any, section: HuggingFaceData) -> None:
        self.rows = rows
        self.tokenizer = tokenizer
        self.section = section

    def at(self, indices: Indices) -> dict[str, list[Any]]:
        """Return the columns of the rows at `indices`."""
        columns: dict[str, list[Any]] = self.rows[indices.tolist()]
        return columns

    def encoded(self, columns: dict[str, list[Any]], **options: Any) -> dict[str, Tensor]:
        """Return the tokenizer's tensors of the rows' texts, [samples, longest] each, as `padded`."""
        pairs = columns[self.section.text_pair] if self.section.text_pair else None
        return self.padded(columns[self.section.text], pairs, **options)

    def padded(self, texts: list[str], pairs: list[str] | None = None, **options: Any) -> dict[str, Tensor]:
        """Return the tokenizer's tensors, padded on the right to the longest, cut at `max_length`."""
        encoding = self.tokenizer(texts, pairs, truncation=True, max_length=self.section.max_length, **options)
        if not any(encoding["input_ids"]):  # nothing but empty texts: a model still wants a place to look at
            padding: dict[str, Any] = {"padding": "max_length", "max_length": 1}
        else:
            padding = {"padding": "longest"}
        padded = dict(self.tokenizer.pad(encoding, padding_side="right", return_tensors="pt", **padding))
        padded["attention_mask"][:, 0] = 1  # an empty text is one end token: a softmax over no place at all is NaN
        return padded

    def fingerprint(self, kind: str) -> str:
        """Return the hash of rows spread over the whole set, of the vocabulary, and of what is done with them."""
        known = np.unique(np.linspace(0, len(self.rows) - 1, _FINGERPRINT_ROWS).astype(np.int64))
        made = self.section.model_dump(exclude={"name", "tokenizer", "split", "configuration", "train_on_prompt"})
        vocabulary = sorted(self.tokenizer.get_vocab().items())
        return windows.fingerprint(kind, len(self.rows), read_or_explain(self.at, known), made, vocabulary)


class TextSource:
    """Texts, a sample each.

    Args:
        kind: of the batches; part of the fingerprint.
        batch: indices -> batch.
        classes: of the labels, if these are classes.
    """

    def __init__(
        self,
        texts: Texts,
        kind: str,
        batch: Callable[[Indices], Batch],
        *,
        classes: int | None = None,
        draws: bool = False,
    ) -> None:
        vocabulary, padding = len(texts.tokenizer), texts.tokenizer.pad_token_id
        self.facts = DataFacts(len(texts.rows), None, vocabulary=vocabulary, classes=classes, padding=padding)
        self.fingerprint = texts.fingerprint(kind)
        self.draws = draws
        self.fetch = batch


def _next_token(texts: Texts, indices: Indices) -> Batch:
    inputs = texts.encoded(texts.at(indices))
    ids, mask = inputs["input_ids"], inputs["attention_mask"]
    return Batch({"tokens": ids}, _following(_valid(ids, mask)), len(indices), int(mask.sum()))


def _causal(texts: Texts, indices: Indices) -> Batch:
    inputs = texts.encoded(texts.at(indices))
    mask = inputs["attention_mask"]
    return Batch(inputs, _valid(inputs["input_ids"], mask), len(indices), int(mask.sum()))


def _masked(texts: Texts, indices: Indices) -> Batch:
    """Hide some tokens, which are the targets (BERT, arXiv:1810.04805, section 3.1): of those chosen, 80 % become the
    mask token, 10 % any token, 10 % stay. Special tokens and padding are never chosen. The draws belong to the sample:
    they are the same in any micro-batch of the epoch."""
    inputs = texts.encoded(texts.at(indices), return_special_tokens_mask=True)
    ids, special = inputs["input_ids"], inputs.pop("special_tokens_mask")
    width = ids.shape[1]
    # three draws a token, token after token, so that they don't depend on the batch's longest
    draws = torch.from_numpy(noise.uniform(indices, 3 * width)).view(len(indices), width, 3)
    chosen = (draws[..., 0] < texts.section.mask_probability) & (special == 0)
    targets = torch.where(chosen, ids, _IGNORED)
    anything = (draws[..., 2] * len(texts.tokenizer)).long()
    replaced = torch.where(draws[..., 1] < 0.8, texts.tokenizer.mask_token_id, anything)
    inputs["input_ids"] = torch.where(chosen & (draws[..., 1] < 0.9), replaced, ids)
    return Batch(inputs, targets, len(indices), int(inputs["attention_mask"].sum()))


def _classified(texts: Texts, label: str, dtype: torch.dtype, own: bool, indices: Indices) -> Batch:
    """Return texts with a class each; for transformers models also with a number, or with several classes."""
    columns = texts.at(indices)
    inputs = texts.encoded(columns)
    mask = inputs["attention_mask"]
    if own:
        inputs = {"tokens": inputs["input_ids"], "mask": mask.bool()}
    return Batch(inputs, torch.tensor(columns[label], dtype=dtype), len(indices), int(mask.sum()))


def _translated(texts: Texts, label: str, indices: Indices) -> Batch:
    """Return texts with a target text each; the tokens of both are counted."""
    columns = texts.at(indices)
    inputs = texts.encoded(columns)
    answers = texts.padded(columns[label])
    tokens = int(inputs["attention_mask"].sum() + answers["attention_mask"].sum())
    return Batch(inputs, _valid(answers["input_ids"], answers["attention_mask"]), len(indices), tokens)


class Completions:
    """Prompts with their completions, one text each, which ends with the tokenizer's end token if it has one. The
    completion alone has targets, or both.

    A sample that is too long loses the beginning of its prompt; a completion that is too long by itself, its end.

    Args:
        label: column with the completion.
        own: for Lockstep's own models, which take `tokens`, and targets that are the next ids.
    """

    def __init__(self, texts: Texts, label: str, *, own: bool) -> None:
        self._texts = texts
        self._label = label
        self._own = own
        end = end_token(texts.tokenizer)
        self._end = [] if end is None else [end]
        around = texts.tokenizer("")["input_ids"]  # such as a begin and an end token
        closing = len(around) > 0 and around[-1] == end
        self._begin = around[:-1] if closing else around

    def batch(self, indices: Indices) -> Batch:
        columns = self._texts.at(indices)
        plain = partial(self._texts.tokenizer, add_special_tokens=False)
        prompts = plain(columns[self._texts.section.text])["input_ids"]
        completions = plain(columns[self._label])["input_ids"]
        pairs = [self._fitted(prompt, own) for prompt, own in zip(prompts, completions, strict=True)]
        longest = max(len(prompt) + len(completion) for prompt, completion in pairs)
        padding = self._texts.tokenizer.pad_token_id
        ids = torch.full((len(pairs), longest), padding if padding is not None else 0)
        mask, targets = torch.zeros_like(ids), torch.full_like(ids, _IGNORED)
        for row, (prompt, completion) in enumerate(pairs):
            both = torch.tensor([*prompt, *completion])
            first = 0 if self._texts.section.train_on_prompt else len(prompt)
            ids[row, : len(both)] = both
            mask[row, : len(both)] = 1
            targets[row, first : len(both)] = both[first:]
        if self._own:
            return Batch({"tokens": ids}, _following(targets), len(indices), int(mask.sum()))
        return Batch({"input_ids": ids, "attention_mask": mask}, targets, len(indices), int(mask.sum()))

    def _fitted(self, prompt: list[int], completion: list[int]) -> tuple[list[int], list[int]]:
        most = self._texts.section.max_length
        completion = [*completion, *self._end][: max(most - len(self._begin) - (not self._begin), 1)]
        left = max(most - len(completion) - len(self._begin), 0)
        return [*self._begin, *prompt[max(len(prompt) - left, 0) :]], completion


def _packed(texts: Texts, *, aligned: bool) -> windows.WindowSource:
    """Return documents joined by the end token and cut into full samples of `max_length`; all is tokenized now."""
    section, end = texts.section, end_token(texts.tokenizer)
    if end is None:
        raise ConfigError("packed needs a tokenizer with an end token (eos or sep); this one has none")
    parts, text_bytes = [], 0
    for columns in texts.rows.iter(batch_size=1000):
        documents = columns[section.text]
        text_bytes += sum(len(document.encode()) for document in documents)
        for ids in texts.tokenizer(documents, add_special_tokens=False)["input_ids"]:
            parts.append(np.array([*ids, end], dtype=np.uint32))
    stream = np.concatenate(parts)
    return windows.WindowSource(
        windows.cut_windows(stream, section.max_length, f"data set {section.name}"),
        windows.fingerprint("packed", section.max_length, stream),
        aligned=aligned,
        vocabulary=len(texts.tokenizer),
        bytes_per_token=text_bytes / len(stream),
    )


def _valid(ids: Tensor, mask: Tensor) -> Tensor:
    """Return the ids as targets: padding is none, also where it is the same id as the end of a text."""
    return ids.masked_fill(mask == 0, _IGNORED)


def _following(targets: Tensor) -> Tensor:
    """Return for each position the target after it."""
    following = torch.full_like(targets, _IGNORED)
    following[:, :-1] = targets[:, 1:]
    return following


def _label_dtype(label: object) -> torch.dtype:
    """Return the dtype of targets: classes are whole; numbers, and several classes of a text, are not."""
    return torch.float32 if isinstance(label, float | list) else torch.int64


def _num_outputs(rows: Any, label: str) -> int:
    """Return how many numbers a text has: one, or as many as there are classes, each 0 or 1.

    Raises:
        ConfigError: texts differ in it.
    """
    lengths = {len(value) if isinstance(value, list) else 1 for value in rows[label]}
    if len(lengths) > 1:
        raise ConfigError(
            f"column {label} has lists of {min(lengths)} to {max(lengths)} numbers; several classes a text are a list "
            "of 0 and 1, one for each class"
        )
    return lengths.pop()


def _num_classes(rows: Any, label: str) -> int:
    """Return how many classes the label column has.

    Raises:
        ConfigError: its values aren't numbers from 0 on.
    """
    values = set(rows.unique(label))
    wrong = [value for value in values if not isinstance(value, int)]
    if wrong:
        raise ConfigError(
            f"column {label} has {wrong[0]!r}, but classes are numbers from 0 on, or a ClassLabel feature"
        )
    if min(values) < 0:
        raise ConfigError(f"column {label} has {min(values)}, but classes are numbers from 0 on; is the split labeled?")
    named = getattr(rows.features[label], "names", None) or ()  # a ClassLabel's, also of classes that don't occur here
    return max(len(named), int(max(values)) + 1)
