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
from lockstep.data.order import Indices
from lockstep.data.rows import check_columns, load_rows
from lockstep.data.tasks import OWN
from lockstep.data.tokenizers import load_tokenizer
from lockstep.data.unreadable import read_or_explain

_NO_TARGET = -100
_COMPLETED = ("causal-lm", OWN)
_NEEDS_LABEL = {"sequence-classification": "the class", "seq2seq": "the target text"}
_ROWS_TO_KNOW_BY = 256  # how many rows a fingerprint looks at


def open_huggingface(section: HuggingFaceData, *, task: str | None, tokenizer: str | None) -> Source:
    """Raises ConfigError: data or tokenizer are missing, or don't suit the task."""
    name = section.tokenizer or tokenizer
    if name is None:
        raise ConfigError("data of kind huggingface needs a `tokenizer`: a folder or hub name; the model has none")
    _check_options(section, task)
    rows = load_rows(section.name, section.configuration, section.split)
    columns = [column for column in (section.text, section.text_pair, section.label) if column is not None]
    check_columns(rows, columns)
    if len(rows) == 0:
        raise ConfigError(f"data set {section.name}, split {section.split}, is empty")
    texts = [section.text, section.text_pair, section.label if task in _COMPLETED or task == "seq2seq" else None]
    _check_texts(rows, [column for column in texts if column is not None])
    text = Texts(rows.select_columns(columns), load_tokenizer(name), section)
    own = task in (None, OWN)
    if section.packed:
        return PackedText(text, aligned=not own)
    match task, section.label:
        case (("causal-lm" | "language-model"), str(label)):
            return CompletedText(text, label, own=own)
        case "causal-lm", _:
            return CausalText(text)
        case "masked-lm", _:
            return MaskedText(text)
        case "seq2seq", str(label):
            return TranslatedText(text, label)
        case _, str(label):
            return ClassifiedText(text, label, own=own)
    return NextTokenText(text)


def _check_options(section: HuggingFaceData, task: str | None) -> None:
    """Raises ConfigError: something is asked for that the task doesn't know, or lacks."""
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
    """Raises ConfigError: a column has something else."""
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

    def __len__(self) -> int:
        return len(self.rows)

    def at(self, indices: Indices) -> dict[str, list[Any]]:
        """The columns of the rows at `indices`."""
        columns: dict[str, list[Any]] = self.rows[indices.tolist()]
        return columns

    def encoded(self, columns: dict[str, list[Any]], **options: Any) -> dict[str, Tensor]:
        """Padded on the right to the longest, cut at `max_length`; [samples, longest] each."""
        pairs = columns[self.section.text_pair] if self.section.text_pair else None
        return self.padded(columns[self.section.text], pairs, **options)

    def padded(self, texts: list[str], pairs: list[str] | None = None, **options: Any) -> dict[str, Tensor]:
        encoding = self.tokenizer(
            texts,
            pairs,
            truncation=True,
            max_length=self.section.max_length,
            **options,
        )
        if not any(encoding["input_ids"]):  # nothing but empty texts: a model still wants a place to look at
            padding: dict[str, Any] = {"padding": "max_length", "max_length": 1}
        else:
            padding = {"padding": "longest"}
        padded = dict(self.tokenizer.pad(encoding, padding_side="right", return_tensors="pt", **padding))
        padded["attention_mask"][:, 0] = 1  # an empty text is one end token: a softmax over no place at all is NaN
        return padded

    def facts(self, samples: int, *, classes: int | None = None) -> DataFacts:
        padding = self.tokenizer.pad_token_id
        return DataFacts(samples, None, vocabulary=len(self.tokenizer), classes=classes, padding=padding)

    def fingerprint(self, kind: str) -> str:
        """Of rows spread over the whole set, of the vocabulary, and of what is done with them."""
        known = np.unique(np.linspace(0, len(self) - 1, _ROWS_TO_KNOW_BY).astype(np.int64))
        made = self.section.model_dump(exclude={"name", "tokenizer", "split", "configuration", "train_on_prompt"})
        vocabulary = sorted(self.tokenizer.get_vocab().items())
        return windows.fingerprint(kind, len(self), read_or_explain(self.at, known), made, vocabulary)


class NextTokenText:
    """For our own language models: the targets are the ids that follow."""

    draws = False

    def __init__(self, text: Texts) -> None:
        self._text = text
        self.facts = text.facts(len(text))
        self.fingerprint = text.fingerprint("next-token")

    def fetch(self, indices: Indices) -> Batch:
        inputs = self._text.encoded(self._text.at(indices))
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        targets = torch.full_like(ids, _NO_TARGET)
        targets[:, :-1] = _valid(ids, mask)[:, 1:]
        return Batch({"tokens": ids}, targets, len(indices), int(mask.sum()))


class CausalText:
    """For causal models of the transformers library."""

    draws = False

    def __init__(self, text: Texts) -> None:
        self._text = text
        self.facts = text.facts(len(text))
        self.fingerprint = text.fingerprint("causal-lm")

    def fetch(self, indices: Indices) -> Batch:
        inputs = self._text.encoded(self._text.at(indices))
        mask = inputs["attention_mask"]
        return Batch(inputs, _valid(inputs["input_ids"], mask), len(indices), int(mask.sum()))


class CompletedText:
    """Prompts with their completions, one text each, which ends with the tokenizer's end token if it has one. Targets
    are those of the completion alone, or of both.

    A sample that is too long loses the beginning of its prompt; a completion that is too long by itself, its end.

    Args:
        label: column with the completion.
        own: for our own models, which take `tokens`, and targets that are the next ids.
    """

    draws = False

    def __init__(self, text: Texts, label: str, *, own: bool) -> None:
        self._text = text
        self._label = label
        self._own = own
        tokenizer = text.tokenizer
        end = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else tokenizer.sep_token_id
        self._end = [] if end is None else [end]
        around = tokenizer("")["input_ids"]  # such as a begin and an end token
        closing = len(around) > 0 and around[-1] == end
        self._begin = around[:-1] if closing else around
        self.facts = text.facts(len(text))
        self.fingerprint = text.fingerprint("prompt, loss" if text.section.train_on_prompt else "prompt")

    def fetch(self, indices: Indices) -> Batch:
        columns = self._text.at(indices)
        plain = partial(self._text.tokenizer, add_special_tokens=False)
        prompts = plain(columns[self._text.section.text])["input_ids"]
        completions = plain(columns[self._label])["input_ids"]
        pairs = [self._fitted(prompt, own) for prompt, own in zip(prompts, completions, strict=True)]
        longest = max(len(prompt) + len(completion) for prompt, completion in pairs)
        padding = self._text.tokenizer.pad_token_id
        ids = torch.full((len(pairs), longest), padding if padding is not None else 0)
        mask, targets = torch.zeros_like(ids), torch.full_like(ids, _NO_TARGET)
        for row, (prompt, completion) in enumerate(pairs):
            both = torch.tensor([*prompt, *completion])
            first = 0 if self._text.section.train_on_prompt else len(prompt)
            ids[row, : len(both)] = both
            mask[row, : len(both)] = 1
            targets[row, first : len(both)] = both[first:]
        tokens = int(mask.sum())
        if not self._own:
            return Batch({"input_ids": ids, "attention_mask": mask}, targets, len(indices), tokens)
        following = torch.full_like(ids, _NO_TARGET)
        following[:, :-1] = targets[:, 1:]
        return Batch({"tokens": ids}, following, len(indices), tokens)

    def _fitted(self, prompt: list[int], completion: list[int]) -> tuple[list[int], list[int]]:
        most = self._text.section.max_length
        completion = [*completion, *self._end][: max(most - len(self._begin) - (not self._begin), 1)]
        room = max(most - len(completion) - len(self._begin), 0)
        return [*self._begin, *prompt[max(len(prompt) - room, 0) :]], completion


class PackedText:
    """Documents joined by the end token and cut into full samples of `max_length`; all is tokenised at the start."""

    draws = False

    def __init__(self, text: Texts, *, aligned: bool) -> None:
        stream, mean_bytes = _joined(text)
        self._windows = windows.cut_windows(stream, text.section.max_length, f"data set {text.section.name}")
        self._aligned = aligned
        self.facts = DataFacts(
            len(self._windows),
            text.section.max_length,
            vocabulary=len(text.tokenizer),
            bytes_per_token=mean_bytes,
        )
        self.fingerprint = windows.fingerprint("packed", text.section.max_length, stream)

    def fetch(self, indices: Indices) -> Batch:
        return windows.next_token_batch(self._windows, indices, aligned=self._aligned)


class MaskedText:
    """Some tokens are hidden and are the targets (BERT, arXiv:1810.04805, section 3.1): of those chosen, 80 % become
    the mask token, 10 % any token, 10 % stay. Special tokens and padding are never chosen. What is drawn belongs to
    the sample: the same in any micro-batch of the epoch."""

    draws = True

    def __init__(self, text: Texts) -> None:
        if text.tokenizer.mask_token_id is None:
            raise ConfigError("masked-lm needs a tokenizer with a mask token; this one has none")
        self._text = text
        self.facts = text.facts(len(text))
        self.fingerprint = text.fingerprint("masked-lm")

    def fetch(self, indices: Indices) -> Batch:
        inputs = self._text.encoded(self._text.at(indices), return_special_tokens_mask=True)
        ids, special = inputs["input_ids"], inputs.pop("special_tokens_mask")
        width = ids.shape[1]
        # three draws a token, token after token, so that they don't depend on the batch's longest
        draws = torch.from_numpy(noise.uniform(indices, 3 * width)).view(len(indices), width, 3)
        chosen = (draws[..., 0] < self._text.section.mask_probability) & (special == 0)
        targets = torch.where(chosen, ids, _NO_TARGET)
        anything = (draws[..., 2] * len(self._text.tokenizer)).long()
        replaced = torch.where(draws[..., 1] < 0.8, self._text.tokenizer.mask_token_id, anything)
        inputs["input_ids"] = torch.where(chosen & (draws[..., 1] < 0.9), replaced, ids)
        return Batch(inputs, targets, len(indices), int(inputs["attention_mask"].sum()))


class ClassifiedText:
    """Texts with a class each; for models of the transformers library also with a number, or with several classes.

    Args:
        own: for our own models, which take `tokens` and `mask`.
    """

    draws = False

    def __init__(self, text: Texts, label: str, *, own: bool) -> None:
        self._text = text
        self._label = label
        self._own = own
        self._dtype = torch.int64 if own else _dtype_of(text.rows[0][label])
        classes = _classes(text.rows, label) if self._dtype is torch.int64 else _outputs(text.rows, label)
        self.facts = text.facts(len(text), classes=classes)
        self.fingerprint = text.fingerprint("classification")

    def fetch(self, indices: Indices) -> Batch:
        columns = self._text.at(indices)
        inputs = self._text.encoded(columns)
        mask = inputs["attention_mask"]
        if self._own:
            inputs = {"tokens": inputs["input_ids"], "mask": mask.bool()}
        targets = torch.tensor(columns[self._label], dtype=self._dtype)
        return Batch(inputs, targets, len(indices), int(mask.sum()))


class TranslatedText:
    """Texts with a target text each. The tokens counted are those of both."""

    draws = False

    def __init__(self, text: Texts, label: str) -> None:
        self._text = text
        self._label = label
        self.facts = text.facts(len(text))
        self.fingerprint = text.fingerprint("seq2seq")

    def fetch(self, indices: Indices) -> Batch:
        columns = self._text.at(indices)
        inputs = self._text.encoded(columns)
        answers = self._text.padded(columns[self._label])
        labels = _valid(answers["input_ids"], answers["attention_mask"])
        tokens = int(inputs["attention_mask"].sum() + answers["attention_mask"].sum())
        return Batch(inputs, labels, len(indices), tokens)


def _valid(ids: Tensor, mask: Tensor) -> Tensor:
    """The ids as targets: padding is none, also where it is the same id as the end of a text."""
    return ids.masked_fill(mask == 0, _NO_TARGET)


def _dtype_of(label: object) -> torch.dtype:
    """Classes are whole; numbers, and several classes of a text, are not."""
    return torch.float32 if isinstance(label, float | list) else torch.int64


def _outputs(rows: Any, label: str) -> int:
    """How many numbers a text has: one, or as many as there are classes, each 0 or 1.

    Raises ConfigError: not always as many.
    """
    lengths = {len(value) if isinstance(value, list) else 1 for value in rows[label]}
    if len(lengths) > 1:
        raise ConfigError(
            f"column {label} has lists of {min(lengths)} to {max(lengths)} numbers; several classes a text are a list "
            "of 0 and 1, one for each class"
        )
    return lengths.pop()


def _classes(rows: Any, label: str) -> int:
    """How many classes the label column has; raises ConfigError if it has none that are numbers from 0 on."""
    values = set(rows.unique(label))
    wrong = [value for value in values if not isinstance(value, int)]
    if wrong:
        raise ConfigError(
            f"column {label} has {wrong[0]!r}, but classes are numbers from 0 on, or a ClassLabel feature"
        )
    if min(values) < 0:
        raise ConfigError(
            f"column {label} has {min(values)}, but classes are numbers from 0 on; is the split labelled?"
        )
    named = getattr(rows.features[label], "names", None) or ()  # a ClassLabel's, also of classes that don't occur here
    return max(len(named), int(max(values)) + 1)


def _joined(text: Texts) -> tuple[windows.Tokens, float]:
    """All documents' ids, each followed by the end token, and the bytes of text per id."""
    end = text.tokenizer.eos_token_id if text.tokenizer.eos_token_id is not None else text.tokenizer.sep_token_id
    if end is None:
        raise ConfigError("packed needs a tokenizer with an end token (eos or sep); this one has none")
    parts, text_bytes = [], 0
    for columns in text.rows.iter(batch_size=1000):
        documents = columns[text.section.text]
        text_bytes += sum(len(document.encode()) for document in documents)
        for ids in text.tokenizer(documents, add_special_tokens=False)["input_ids"]:
            parts.append(np.array([*ids, end], dtype=np.uint32))
    stream = np.concatenate(parts)
    return stream, text_bytes / len(stream)
