"""Datasets of the datasets library as batches for a task.

    rows --> texts --> tokenizer --> padded to the batch's longest, joined and cut into full samples (packed: true),
                                     or put into samples, each for itself (packed prompts; packed: whole; `rendered`)

                               inputs                           targets
    causal-lm                  input_ids, attention_mask        the ids themselves (the objective shifts them); with a
                                                                label column, the completion's; of `messages`, the
                                                                assistant's (`chats`)
    masked-lm                  the same, some ids hidden        the hidden ids
    the same, with `rejected`  two rows for each sample         the answers' ids (`preferences`)
    sequence-classification    the same                         classes [samples]; numbers; [samples, classes]
    other tasks                                                 in `annotated`
    seq2seq                    the same                         the ids of the target text
    language-model (Lockstep)  tokens                           the next ids; with a label column, of the completion
    none (Lockstep's models)   tokens, mask                     classes if there is a label column, else the next ids

Targets of -100, such as padding, are ignored. Packed datasets are tokenized once per machine or shared folder, into
$LOCKSTEP_CACHE/packed/KEY/ (`tokens`); KEY.lock is held meanwhile, and ranks wait for it outside collectives.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.config.schema import Config, HuggingFaceData, Tokens
from lockstep.core.cache_files import cache_folder
from lockstep.core.errors import ConfigError, UnusableSamples
from lockstep.core.hub import at_revision
from lockstep.core.protocols import Source
from lockstep.core.records import IGNORED, LANGUAGE_MODEL, Batch
from lockstep.core.tasks import TASKS
from lockstep.data import noise
from lockstep.data.annotated import ImageSource, answering, choosing, tagging
from lockstep.data.chats import open_chats
from lockstep.data.class_labels import ClassLabels, class_labels
from lockstep.data.columns import OF_LISTS, check_columns, check_first_texts, columns_of, ratings
from lockstep.data.hub import (
    begin_tokens,
    end_token,
    huggingface_sections,
    load_image_processor,
    load_rows,
    load_tokenizer,
    rows_identity,
    tokenizer_identity,
)
from lockstep.data.order import Indices, fingerprint
from lockstep.data.prepare import plain_tokenizer, texts_of, write_splits
from lockstep.data.rendered import Rendered, RenderedSource, following, open_rendered, padded_batch
from lockstep.data.texts import FORMAT, Texts, TextSource
from lockstep.data.tokens import cached_folder, open_tokens

_LOG = logging.getLogger("lockstep.data")
_COMPLETED = ("causal-lm", LANGUAGE_MODEL)
_REWARDS = "sequence-classification"


def open_huggingface(
    section: HuggingFaceData, *, task: str | None, tokenizer: str | None, class_names: Sequence[str] = ()
) -> Source:
    """Return the source of a dataset's rows. Raises ConfigError."""
    name = section.tokenizer or tokenizer
    if name is None:
        what = "a `tokenizer`" if section.image is None else "a `tokenizer`, here an image processor"
        raise ConfigError(f"data of kind huggingface needs {what}: a folder or hub name; the model has none")
    _check_options(section, task)
    rows = load_rows(section.name, section.configuration, section.split, section.revision)
    columns = columns_of(section)
    check_columns(rows.column_names, columns)
    if len(rows) == 0:
        raise ConfigError(f"dataset {section.name}, split {section.split}, is empty")
    rows = rows.select_columns(columns)
    if section.image is not None:
        return ImageSource(rows, load_image_processor(name), section, class_names)
    loaded = load_tokenizer(name, section.chat_template, words=task == "token-classification")
    if section.messages is not None:
        aligned, classes = task not in (None, LANGUAGE_MODEL), 1 if task == _REWARDS else None
        return open_chats(rows, loaded, section, aligned=aligned, classes=classes)
    label_is_text = task in _COMPLETED or task == "seq2seq" or section.rejected is not None
    no_texts = (section.desirable, None if label_is_text else section.label)
    of_text = [column for column in columns if column not in no_texts]
    if task in OF_LISTS:
        of_text = [section.text] if task == "multiple-choice" else []
    check_first_texts(rows[0], of_text)
    texts = Texts(rows, loaded, section, of_text)
    own = task in (None, LANGUAGE_MODEL)
    if of_text:
        _warn_of_second_begin(loaded, rows[0][section.text], section.name)
    if section.packed and not section.keeps_apart:
        return _joined(texts, aligned=not own)
    if section.label is not None and (task in _COMPLETED or section.rejected is not None):
        kind = "prompt, loss" if section.train_on_prompt else "prompt"
        answers = [section.label, *([] if section.rejected is None else [section.rejected])]
        end = end_token(texts.tokenizer)
        closing = [] if end is None else [end]
        completions = partial(_completions, texts, answers, begin_tokens(texts.tokenizer), closing)
        if section.packed:
            return _packed(texts, completions, aligned=not own)
        rated = None
        if section.desirable is not None:
            rated = torch.tensor(ratings(rows, section.desirable, section.name))
            kind = f"{kind}, desirable {fingerprint(rated.tolist())}"
        batch, kind = partial(_completed, texts, completions, own, rated), ", ".join([kind, *answers[1:]])
        return TextSource(texts, kind, batch, classes=1 if task == _REWARDS else None)
    if section.packed:
        return _packed(texts, partial(_whole, texts), aligned=not own)
    return _source(texts, task, partial(class_labels, rows, section.label or "", texts.where, class_names))


def _source(texts: Texts, task: str | None, labeled: Callable[..., ClassLabels]) -> Source:
    """Return the source of a task with a sample for each row; `labeled` returns the classes of its labels."""
    own = task in (None, LANGUAGE_MODEL)
    match task, texts.section.label:
        case "masked-lm", _:
            if texts.tokenizer.mask_token_id is None:
                raise ConfigError("masked-lm needs a tokenizer with a mask token; this one has none")
            return TextSource(texts, "masked-lm", partial(_masked, texts), draws=True)
        case "seq2seq", str(label):
            return TextSource(texts, "seq2seq", partial(_translated, texts, label))
        case "token-classification", _:
            labels = labeled(tags=True)
            return TextSource(texts, "tags", tagging(texts, labels), labels=labels)
        case "question-answering", _:
            return TextSource(texts, "answers", answering(texts))
        case "multiple-choice", _:
            labels = labeled()
            return TextSource(texts, "choices", choosing(texts, labels), labels=labels)
        case ("causal-lm", _) | (_, None):
            return TextSource(texts, "next-token" if own else "causal-lm", partial(_next_token, texts, own))
        case _, str(label):
            labels = labeled()
            if own and (labels.several or labels.numbers is None):
                raise ConfigError(f"column {label} has no class, which a model of Lockstep or of your own needs")
            return TextSource(texts, "classification", partial(_classified, texts, label, labels, own), labels=labels)
    raise AssertionError(task)


def _warn_of_second_begin(tokenizer: Any, text: object, name: str) -> None:
    begin = tokenizer.bos_token
    if isinstance(text, str) and begin and text.startswith(begin) and begin_tokens(tokenizer):
        remedy = "remove it from the texts, or train on the conversations themselves (messages)"
        _LOG.warning("%s: texts begin with %s, and the tokenizer adds another one; %s", name, begin, remedy)


def _check_options(section: HuggingFaceData, task: str | None) -> None:
    model, ours = task or "a custom model", (None, *_COMPLETED)
    completes = task in _COMPLETED and section.label is not None
    other = "packed" if section.packed else "label, the column with completions,"
    default = type(section).model_fields["mask_probability"].default  # a run's recorded config has it, too
    chat = section.messages is not None
    paired = section.rejected is not None
    needed = TASKS[task].reads or {} if task and task in TASKS else {}
    missing = [
        f"`{key}`, the name of the column with {what}" for key, what in needed.items() if not getattr(section, key)
    ]
    pairs = section.text_pair if isinstance(section.text_pair, tuple) else None
    of_language, rewards = "for language models (causal-lm)", (*ours, _REWARDS)
    for given, purpose, tasks, remedy in (
        (paired, "rejected is for language models and for rewards (sequence-classification)", rewards, "remove it"),
        (section.desirable, f"desirable is {of_language}", ours, "remove it"),
        (chat, f"messages are {of_language}", rewards if paired else ours, "write them as text"),
        (section.image, "image is for image-classification", ("image-classification",), "remove image"),
        (pairs, f"text_pair {pairs}: several columns are for multiple-choice", ("multiple-choice",), "name one"),
        (section.mask_probability != default, "mask_probability is for masked-lm", ("masked-lm",), "remove it"),
    ):
        if given and task not in tasks:
            raise ConfigError(f"{purpose}, but this is {model}; {remedy}")
    refused = {
        f"{task} needs {' and '.join(missing)}": bool(missing) and not paired,
        f"label {section.label}: masked-lm hides tokens of `text`, which are its targets; remove label": (
            task == "masked-lm" and section.label is not None
        ),
        f"packed is for language models, but {task or 'a classifier'} needs separate samples; remove it": (
            bool(section.packed) and (task not in ours or (task is None and section.label is not None))
        ),
        f"text_pair {section.text_pair} and {other} exclude each other; remove one of them": (
            section.text_pair is not None and (section.packed or completes)
        ),
        "text_pair: the words of token-classification have no second text; remove it": (
            section.text_pair is not None and task == "token-classification"
        ),
        "train_on_prompt is for language models with prompts (`text`) and completions (`label`), but this is "
        f"{model}{'' if section.label else ' without `label`'}; remove train_on_prompt": (
            section.train_on_prompt and not completes
        ),
    }
    for message, is_wrong in refused.items():
        if is_wrong:
            raise ConfigError(message)


def _next_token(texts: Texts, own: bool, indices: Indices) -> Batch:
    inputs = texts.encoded(texts.at(indices))
    targets, tokens = _valid(inputs), int(inputs["attention_mask"].sum())
    if own:
        return Batch({"tokens": inputs["input_ids"]}, following(targets), len(indices), tokens)
    return Batch(inputs, targets, len(indices), tokens)


def _masked(texts: Texts, indices: Indices) -> Batch:
    """Hide some tokens, which become the targets (BERT, arXiv:1810.04805, section 3.1).

    Of the chosen tokens, 80 % become the mask token, 10 % a random token, and 10 % stay. Special tokens and padding are
    never chosen. The draws belong to the sample: they are the same in any micro-batch of the epoch.
    """
    inputs = texts.encoded(texts.at(indices), return_special_tokens_mask=True)
    ids, special = inputs["input_ids"], inputs.pop("special_tokens_mask")
    width = ids.shape[1]
    # three draws a token, token after token, so that they don't depend on the batch's longest
    draws = torch.from_numpy(noise.uniform(indices, 3 * width)).view(len(indices), width, 3)
    chosen = (draws[..., 0] < texts.section.mask_probability) & (special == 0)
    targets = torch.where(chosen, ids, IGNORED)
    random_ids = (draws[..., 2] * len(texts.tokenizer)).long()
    replaced = torch.where(draws[..., 1] < 0.8, texts.tokenizer.mask_token_id, random_ids)
    inputs["input_ids"] = torch.where(chosen & (draws[..., 1] < 0.9), replaced, ids)
    return Batch(inputs, targets, len(indices), int(inputs["attention_mask"].sum()))


def _classified(texts: Texts, label: str, labels: ClassLabels, own: bool, indices: Indices) -> Batch:
    columns = texts.at(indices)
    inputs = texts.encoded(columns)
    mask = inputs["attention_mask"]
    if own:
        inputs = {"tokens": inputs["input_ids"], "mask": mask.bool()}
    return Batch(inputs, labels.tensor(columns[label]), len(indices), int(mask.sum()))


def _translated(texts: Texts, label: str, indices: Indices) -> Batch:
    columns = texts.at(indices)
    inputs, answers = texts.encoded(columns), texts.padded(texts.encoding_of(columns[label]))
    tokens = int(inputs["attention_mask"].sum() + answers["attention_mask"].sum())
    return Batch(inputs, _valid(answers), len(indices), tokens)


Ids = list[tuple[list[int], list[bool], bool]]
"""Rows of ids, which of them are targets, and whether the text was cut."""


def _completions(texts: Texts, labels: list[str], begin: list[int], end: list[int], indices: Indices) -> Ids:
    """Join prompts with their completions, closed by the tokenizer's end token, if it has one.

    A row for each column of `labels`, and for rated answers one with the completion of the dataset's row before. The
    targets are the completion, or both. A sample that is too long loses the beginning of its prompt; a completion that
    is too long by itself, or another sample's, its end.
    """
    columns, longest = texts.at(indices), texts.section.max_length
    plain = partial(texts.tokenizer, add_special_tokens=False)
    rows: Ids = []
    prompts, *answers = (plain(columns[name])["input_ids"] for name in (texts.section.text, *labels))
    compared = len(answers)
    if texts.section.desirable is not None:
        before = [str(text or "") for text in texts.before(indices)[labels[0]]]
        answers.append(plain(before)["input_ids"])
    for prompt, *completions in zip(prompts, *answers, strict=True):
        closed = [[*ids, *end] for ids in completions]
        kept = [ids[: max(longest - len(begin) - (not begin), 1)] for ids in closed]
        left = max(longest - max(map(len, kept[:compared])) - len(begin), 0)
        start = [*begin, *prompt[max(len(prompt) - left, 0) :]]
        for whole, ids in zip(closed, kept, strict=True):
            ids = ids[: max(longest - len(start), 1)]
            marks = [texts.section.train_on_prompt] * len(start) + [True] * len(ids)
            is_cut = len(marks) < len(begin) + len(prompt) + len(whole)
            rows.append(([*start, *ids], marks, is_cut))
    return rows


def _completed(
    texts: Texts, completions: Callable[[Indices], Ids], own: bool, rated: Tensor | None, indices: Indices
) -> Batch:
    desirable = None if rated is None else rated[torch.from_numpy(indices)]
    rows = [(ids, marks) for ids, marks, _ in completions(indices)]
    return padded_batch(rows, texts.tokenizer.pad_token_id, len(indices), aligned=not own, desirable=desirable)


def _whole(texts: Texts, indices: Indices) -> Ids:
    """Return the ids of `_next_token`, all of them targets."""
    column = texts.at(indices)[texts.section.text]
    whole = texts.tokenizer(column, verbose=False)["input_ids"]
    is_short = max(map(len, whole)) <= texts.section.max_length
    kept = whole if is_short else texts.encoding_of(column)["input_ids"]
    return [(ids, [True] * len(ids), len(ids) < len(each)) for ids, each in zip(kept, whole, strict=True)]


def _packed(texts: Texts, ids: Callable[[Indices], Ids], *, aligned: bool) -> RenderedSource:
    """Put several texts into a sample, each with the ids and targets that it has alone."""
    options = texts.section.model_dump(include={"text", "label", "train_on_prompt", "max_length"})
    key = fingerprint(
        "apart",
        FORMAT,
        *rows_identity(texts.rows),
        tokenizer_identity(texts.tokenizer),
        end_token(texts.tokenizer),
        options,
    )

    def render(indices: Indices) -> Iterator[list[Rendered]]:
        try:
            rows = ids(indices)
        except UnusableSamples as error:
            raise ConfigError(str(error)) from error
        for values, marks, is_cut in rows:
            yield [Rendered(np.array(values, np.uint32), np.array(marks, np.bool_), is_cut)]

    return open_rendered("packed", key, len(texts.rows), render, texts.tokenizer, texts.section, aligned=aligned)


def _joined(texts: Texts, *, aligned: bool) -> Source:
    """Join all documents by the end token, tokenized once for all ranks, runs and lengths, and cut them."""
    section, tokenizer = texts.section, plain_tokenizer(texts.tokenizer.name_or_path, texts.tokenizer)

    def tokenize(folder: Path, show: Callable[[str], None]) -> None:
        write_splits(folder, ["train"], tokenizer, texts_of(texts.rows, section.text, texts.where), show)

    folder = cached_folder("packed", texts.stream_key(), f"tokenizing dataset {section.name}", tokenize)
    return open_tokens(Tokens(kind="tokens", folder=str(folder), length=section.max_length), aligned=aligned)


def _valid(encoding: dict[str, Tensor]) -> Tensor:
    return encoding["input_ids"].masked_fill(encoding["attention_mask"] == 0, IGNORED)


def fetch_tokens(config: Config) -> Iterator[str]:
    """Tokenize the packed datasets of a run into the cache; yield a line for each."""
    pretrained, sections = huggingface_sections(config)
    task = getattr(config.model, "task", None)
    pretrained = at_revision(pretrained, getattr(config.model, "revision", None))
    for section in sections:
        chats = section.messages is not None
        if (chats or section.keeps_apart) and (section.tokenizer or pretrained):
            samples = open_huggingface(section, task=task, tokenizer=pretrained).facts.samples
            what, where = ("conversations", "chats") if chats else ("texts", "packed")
            yield f"{what} of {section.name}, split {section.split}: {samples:,} samples, in {cache_folder(where)}"
        elif section.packed and (section.tokenizer or pretrained):
            facts = open_huggingface(section, task=None, tokenizer=pretrained).facts
            sizes = f"{facts.samples:,} samples of {section.max_length:,} tokens, in {cache_folder('packed')}"
            yield f"tokens of {section.name}, split {section.split}: {sizes}"
