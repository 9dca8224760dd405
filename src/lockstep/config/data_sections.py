"""The section `data`: sources, one class for each kind, and how samples reach a rank."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from lockstep.strategies.section import Auto, Fraction, PathText, PlaceText, Positive, Section, without_effect

SampleIndex = Annotated[int, Field(ge=0, le=2**62 - 1)]


class StdlibText(Section):
    """Source text of the running Python's standard library, as bytes. Every 20th file is held out."""

    kind: Literal["stdlib-text"]
    split: Literal["train", "held-out"] = "train"
    """`train`: all files but every 20th; `held-out`: those."""
    length: Positive = 256
    """Bytes per sample."""
    samples: Positive | None = None
    """Use only the first N samples; null: all."""


class StdlibFunctions(Section):
    """Functions of the standard library; the class is the package that a function comes from."""

    kind: Literal["stdlib-functions"]
    split: Literal["train", "held-out"] = "train"
    """`train`, or the functions that are held out for evaluation."""
    length: Positive = 512
    """Most bytes of a function; longer ones are truncated."""


class Digits(Section):
    """scikit-learn's 1,797 images of handwritten digits, 8 x 8 pixels. Every 5th is held out."""

    kind: Literal["digits"]
    split: Literal["train", "held-out"] = "train"
    """`train`: all images but every 5th; `held-out`: those."""
    shift: Annotated[int, Field(ge=0, le=3)] = 0
    """Augmentation: shift images at random by up to this many pixels."""


class Tokens(Section):
    """Token ids in a memory-mapped file, made by `lockstep data prepare`."""

    kind: Literal["tokens"]
    folder: PlaceText
    """Folder that `lockstep data prepare --output` has written, or the address of a copy of it in an object store, such
    as `s3://bucket/books`."""
    split: str = "train"
    """Name of a split in `folder`."""
    length: Positive = 1024
    """Tokens per sample."""
    documents: Literal["joined", "whole"] = "joined"
    """joined: samples are cut from one stream, wherever documents end; whole: documents are packed into samples, and
    only one longer than a sample is cut."""


class HuggingFaceData(Section):
    """A map-style dataset of the datasets library, from a folder or the local cache."""

    kind: Literal["huggingface"]
    name: PathText
    """Folder, file (.json, .jsonl, .csv, .parquet, .txt), or name on the hub."""
    configuration: str | None = None
    """Configuration (subset) of a dataset that has several, such as `wikitext-2-raw-v1`."""
    split: str = "train"
    """Name of a split, with slices such as `train[:1000]`."""
    text: str = "text"
    """Column with the text."""
    text_pair: str | None = None
    """Column with a second text, encoded after the first; null: there is none."""
    label: str | None = None
    """Column with the class (classification; floats for regression, a list of 0 and 1 for several classes), the target
    text (seq2seq), or the completion of the prompt in `text` (language models), which alone is trained on."""
    train_on_prompt: bool = False
    """Language models with `label`: also train on the prompt's tokens."""
    tokenizer: PathText | None = None
    """Folder or hub name; null: that of the model."""
    max_length: Positive = 512
    """Most tokens of a sample. A prompt that is too long with its completion loses its beginning."""
    packed: bool = False
    """Language models: join documents and cut them into full samples, instead of padding."""
    mask_probability: Fraction = 0.15
    """Masked language models: fraction of tokens to predict."""


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
    """`given`: a collate function that is also passed in Python; null: torch's."""


DataSource = Annotated[
    StdlibText | StdlibFunctions | Digits | Tokens | HuggingFaceData | CustomData | GivenData,
    Field(discriminator="kind"),
]


class Loader(Section):
    """Worker processes, prefetch and memory of the data loader."""

    workers: Annotated[int, Field(ge=0)] = 0
    """Worker processes per rank; 0 reads samples in the rank itself, which is fastest for small ones."""
    prefetch: Positive = 2
    """Micro-batches that each worker holds ready."""
    persistent_workers: bool = True
    """Keep workers from epoch to epoch."""
    pin_memory: bool | Auto = "auto"
    """Page-locked memory, for faster copies to a GPU; auto: on a GPU."""


class BadSamples(Section):
    """Training samples that can't be read, or not be put into a batch."""

    policy: Literal["fail", "skip"] = "fail"
    """fail: the first one ends the run, saved; skip: it is left out of its update. Positions, global batches, rates
    and all other samples stay the same. One whose reading ends the process is named, and not left out."""
    limit: Positive = 10
    """skip: the run ends with a list of them once there are more. A sample that every epoch leaves out counts once."""
    timeout: Annotated[float, Field(gt=0)] | None = 30.0
    """skip: seconds after which reading a sample counts as endless, and ends; null: never. A dataset that reads several
    at once (`__getitems__`) may take as long for a micro-batch."""

    @model_validator(mode="after")
    def _options_have_an_effect(self) -> BadSamples:
        if not self.skips and (options := without_effect(self, "policy")):
            raise ValueError(f"{options} without effect: write policy: skip, too, or leave it out")
        return self

    @property
    def skips(self) -> bool:
        """True if they are left out."""
        return self.policy == "skip"


FATAL = BadSamples()
"""The first sample that can't be used ends the run."""


class Data(Section):
    """The data for training and evaluation."""

    train: DataSource
    """Training data; `kind` selects which of these."""
    evaluation: dict[str, DataSource] = {}
    """Evaluation sets by name."""
    shuffle: bool = True
    """Shuffle each epoch, as a function of seed, epoch and position alone."""
    drop_last: bool = False
    """Drop the last samples of an epoch that don't fill a global batch; false: the last update is smaller."""
    bad_samples: BadSamples = BadSamples()
    leave_out: tuple[tuple[SampleIndex, SampleIndex], ...] = ()
    """Samples of `train` that every epoch leaves out of their updates, as ranges [first, last] of indices:
    `[[17, 17], [100, 163]]`. Positions, global batches, rates and all other samples stay the same."""
    loader: Loader = Loader()

    @field_validator("leave_out")
    @classmethod
    def _ranges_ascend(cls, ranges: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        for first, last in ranges:
            if first > last:
                raise ValueError(f"[{first}, {last}] ends before its first sample; write [{last}, {first}]")
        return ranges
