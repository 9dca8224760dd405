"""The section `data`: sources, one class for each kind, and how samples reach a rank."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator

from lockstep.strategies.section import Auto, Fraction, PathText, PlaceText, Positive, Section, without_effect

SampleIndex = Annotated[int, Field(ge=0, le=2**62 - 1)]


class StdlibText(Section):
    """Source text of Python's standard library, as bytes."""

    kind: Literal["stdlib-text"]
    split: Literal["train", "held-out"] = "train"
    """`train`: 19 of 20 files; `held-out`: the rest."""
    length: Positive = 256
    """Bytes per sample."""
    samples: Positive | None = None
    """Use only the first N samples; null: all."""


class StdlibFunctions(Section):
    """Functions of the standard library; the class is the package that a function comes from."""

    kind: Literal["stdlib-functions"]
    split: Literal["train", "held-out"] = "train"
    """`train`, or the functions held out for evaluation."""
    length: Positive = 512
    """A longer function is truncated to this many bytes."""


class Digits(Section):
    """scikit-learn's 1,797 images of handwritten digits, 8 x 8 pixels."""

    kind: Literal["digits"]
    split: Literal["train", "held-out"] = "train"
    """`train`: 4 of 5 images; `held-out`: the rest."""
    shift: Annotated[int, Field(ge=0, le=3)] = 0
    """Augmentation: shift images at random by up to this many pixels."""


class Tokens(Section):
    """Token ids in a memory-mapped file, made by `lockstep data prepare`."""

    kind: Literal["tokens"]
    folder: PlaceText
    """Folder written by `lockstep data prepare --output`, or its copy in an object store, such as
    `s3://bucket/books`."""
    split: str = "train"
    """Name of a split in `folder`."""
    length: Positive = 1024
    """Tokens per sample."""
    documents: Literal["joined", "whole"] = "joined"
    """joined: cut samples from one stream of all documents; whole: pack documents into samples, and cut only those that
    are longer."""


CHAT_KEYS = ("messages", "tools", "system", "system_column", "chat_template", "train_on", "too_long")


class HuggingFaceData(Section):
    """A map-style dataset of the datasets library, from a folder or the local cache."""

    kind: Literal["huggingface"]
    name: PathText
    """Folder, file (.json, .jsonl, .csv, .parquet, .txt), or hub name."""
    revision: str | None = None
    """Branch, tag or commit of a dataset on the hub; null: main. A run keeps the commit that it begins with."""
    configuration: str | None = None
    """Configuration (subset), such as `wikitext-2-raw-v1`."""
    split: str = "train"
    """Name of a split, with slices such as `train[:1000]`."""
    text: str = "text"
    """Column with the text; token-classification: with lists of words; question-answering: with the question."""
    text_pair: str | tuple[str, ...] | None = None
    """Column with a second text, encoded after the first: the context of a question, or lists of choices; or several
    columns with a choice each."""
    image: str | None = None
    """image-classification: column with the image."""
    label: str | None = None
    """Column with the class: a number, a text or a ClassLabel; a float for regression; a list of classes, or of 0
    and 1, for multi-label; a list of tags, one for each word, for token-classification; or the right choice. Or column
    with the answers of a question (`text` and `answer_start`, as in SQuAD), the target text (seq2seq), or the
    completion of the prompt in `text` or `messages` (language models)."""
    rejected: str | None = None
    """Pairs of answers, such as for dpo: column with the rejected answer; `label` has the chosen one. With `messages`
    and no `label`, both columns have whole conversations, which begin alike."""
    desirable: str | None = None
    """Rated answers, for kto: column with true (1) for an answer that is desirable, and false (0) for another one. The
    answer is `label`; with `messages` and no `label`, the last message."""
    train_on_prompt: bool = False
    """Language models with `label`: train on the prompt's tokens, too."""
    tokenizer: PathText | None = None
    """Folder or hub name (`NAME`, `NAME@REVISION`) of the tokenizer or image processor; null: the model's."""
    max_length: Positive = 512
    """Longer samples are truncated to this many tokens. A prompt too long with its completion loses its beginning."""
    packed: bool | Literal["whole"] = False
    """Language models: put several texts into each sample of `max_length`, instead of padding. true: conversations
    and prompts with completions stay whole, and none sees another one; texts are joined and cut into full samples.
    whole: so do texts."""
    mask_probability: Fraction = 0.15
    """Masked language models: fraction of tokens to predict."""
    messages: str | None = None
    """Language models: column with conversations, as lists of messages (`role` and `content`, or `from` and `value`);
    with `label`, prompts."""
    tools: str | None = None
    """Chats: column with the tools of a conversation, a list or its JSON."""
    system: str | None = None
    """Chats: system text of conversations that have none."""
    system_column: str | None = None
    """Chats: column with the system text."""
    chat_template: PathText | None = None
    """Chats: file with a chat template (Jinja); null: the tokenizer's."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """Chats: train on the assistant's messages, on the last of them, or on all tokens."""
    too_long: Literal["cut", "leave-out"] = "cut"
    """Chats longer than `max_length`: leave out their first turns, or the whole conversation."""

    @property
    def keeps_apart(self) -> bool:
        """True if samples are several texts in a row, each for itself."""
        return bool(self.packed) and (self.packed == "whole" or self.messages is not None or self.label is not None)

    def _contradictions(self) -> Iterator[str]:
        texts = ("text", "text_pair", "image", "train_on_prompt")
        fields, others = type(self).model_fields, CHAT_KEYS if self.messages is None else texts
        if without := [name for name in others if getattr(self, name) != fields[name].default]:
            remedy = "name the column with conversations as `messages`" if self.messages is None else "remove it"
            kind = "chats" if self.messages is None else "texts"
            hint = "; to train on prompts, write train_on: all" if "train_on_prompt" in without else ""
            yield f"{without[0]} is for {kind}; {remedy}{hint}"
        of_text = ("text", "text_pair", "max_length", "packed", "mask_probability", "rejected", "desirable")
        if self.image is not None and (
            textual := [key for key in of_text if getattr(self, key) != fields[key].default]
        ):
            yield f"{textual[0]} is for texts, and samples are images; remove it, or image"
        if self.rejected is not None and self.messages is None and self.label is None:
            yield "rejected is one of two answers; name the column with the chosen one as `label`"
        if self.desirable is not None and self.rejected is not None:
            yield "desirable rates single answers, and rejected makes pairs of them; remove one of them"
        if self.desirable is not None and self.messages is None and self.label is None:
            yield "desirable rates an answer; name the column with the answers as `label`"
        trains_more = self.packed or self.text_pair is not None or self.train_on_prompt or self.train_on == "all"
        if trains_more and not (self.rejected is self.desirable is None):
            yield "only answers are trained on: remove packed, text_pair, train_on_prompt and train_on: all"
        if self.system is not None and self.system_column is not None:
            yield "system and system_column exclude each other; remove one of them"


class CustomData(Section):
    """A custom map-style torch Dataset, by name."""

    kind: Literal["custom"]
    target: PathText
    """`package.module:Name` or `path/to/file.py:Name` of a class or function that returns a Dataset."""
    arguments: dict[str, Any] = {}
    """Keyword arguments for `target`."""
    collate: PathText | None = None
    """`package.module:Name` or `path/to/file.py:Name` of a collate function; null: torch's."""


class GivenData(Section):
    """A Dataset passed in Python: `lockstep.train(config, train_dataset=...)`."""

    kind: Literal["given"]
    collate: Literal["given"] | None = None
    """`given`: a collate function passed in Python; null: torch's."""


DataSource = Annotated[
    StdlibText | StdlibFunctions | Digits | Tokens | HuggingFaceData | CustomData | GivenData,
    Field(discriminator="kind"),
]


class Loader(Section):
    """Worker processes, prefetch and memory of the data loader."""

    workers: Annotated[int, Field(ge=0)] = 0
    """Worker processes per rank; 0 reads in the rank itself, which is fastest for small samples."""
    prefetch: Positive = 2
    """Micro-batches that each worker loads ahead."""
    persistent_workers: bool = True
    """Keep workers between epochs."""
    pin_memory: bool | Auto = "auto"
    """Use page-locked memory, for faster copies to a GPU; auto: on a GPU."""


class BadSamples(Section):
    """Training samples that can't be read, or not be collated."""

    policy: Literal["fail", "skip"] = "fail"
    """fail: save and end the run at the first bad sample; skip: leave the sample out of its step, and change nothing
    else."""
    limit: Positive = 10
    """skip: end the run after more bad samples than this."""
    timeout: Annotated[float, Field(gt=0)] | None = 30.0
    """skip: seconds to wait for a sample; null: no limit. A dataset with `__getitems__` has this long
    for a micro-batch."""

    def _contradictions(self) -> Iterator[str]:
        if not self.skips and (options := without_effect(self, "policy")):
            yield f"{options} without effect: write policy: skip, too, or leave it out"

    @property
    def skips(self) -> bool:
        return self.policy == "skip"


FATAL = BadSamples()
"""The first sample that can't be used ends the run."""


class Data(Section):
    """The data for training and evaluation."""

    train: DataSource
    """The training data."""
    evaluation: dict[str, DataSource] = {}
    """Evaluation sets by name."""
    shuffle: bool = True
    """Shuffle each epoch, as a function of seed and epoch."""
    drop_last: bool = False
    """Drop the last samples of an epoch that don't fill a global batch; false: the last step is smaller."""
    bad_samples: BadSamples = BadSamples()
    leave_out: tuple[tuple[SampleIndex, SampleIndex], ...] = ()
    """Samples of `train` to leave out, as ranges [first, last] of indices: `[[17, 17], [100, 163]]`. Nothing else
    changes."""
    loader: Loader = Loader()

    @field_validator("leave_out")
    @classmethod
    def _ranges_ascend(cls, ranges: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        for first, last in ranges:
            if first > last:
                raise ValueError(f"[{first}, {last}] ends before its first sample; write [{last}, {first}]")
        return ranges
