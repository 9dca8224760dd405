"""The data source that a section of a config describes, and sources with batches adapted to a model's forward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch

from lockstep.config.data_sections import BadSamples
from lockstep.config.schema import CustomData, DataSource, Digits, HuggingFaceData, StdlibFunctions, StdlibText, Tokens
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.protocols import Source
from lockstep.core.records import LANGUAGE_MODEL, Batch
from lockstep.core.tasks import TASKS
from lockstep.data.bad_samples import CONFIGURED, SkippingSource
from lockstep.data.custom import TRAINING, ItemReading, ItemSource, open_custom
from lockstep.data.order import Indices
from lockstep.data.weighted import WeightedDataset

_MOST_LEFT_OUT = 10_000  # each is listed in every checkpoint
_TASKS = {
    "stdlib-text": ("causal-lm",),
    "stdlib-functions": ("sequence-classification",),
    "digits": ("image-classification",),
    "tokens": ("causal-lm",),
    "huggingface": tuple(name for name, task in TASKS.items() if task.reads is not None),
}
"""Tasks of transformers models, by the kinds of data that have batches for them."""


def open_source(
    section: DataSource,
    *,
    task: str | None,
    tokenizer: str | None,
    reading: ItemReading = TRAINING,
    class_names: Sequence[str] = (),
) -> Source:
    """Return the data that `section` describes. Raises ConfigError: it isn't on this machine, or doesn't suit the task.

    Args:
        task: Task of a transformers model, with other input names (`input_ids`); `LANGUAGE_MODEL` for a
            language model of Lockstep; None for any other.
        tokenizer: The model's, for sections without one.
        class_names: Of the run's classes; empty: the data's.
    """
    check_task(section, task)
    aligned = task not in (None, LANGUAGE_MODEL)
    match section:  # the modules of a kind of data are imported only for that kind
        case StdlibText():
            from lockstep.data.stdlib import open_stdlib_text

            return open_stdlib_text(section, aligned=aligned)
        case StdlibFunctions():
            from lockstep.data.stdlib import StdlibFunctionsSource

            return StdlibFunctionsSource(section, aligned=aligned)
        case Digits():
            from lockstep.data.digits import DigitsSource

            return DigitsSource(section, aligned=aligned)
        case Tokens():
            from lockstep.data.tokens import open_tokens

            return open_tokens(section, aligned=aligned)
        case HuggingFaceData():
            from lockstep.data.huggingface import open_huggingface

            return open_huggingface(section, task=task, tokenizer=tokenizer, class_names=class_names)
        case CustomData():
            return open_custom(section, reading)
    raise AssertionError(f"{section.kind}: a dataset from the Python API is adapted, not opened")


def check_task(section: DataSource, task: str | None) -> None:
    """Raise ConfigError if a kind of data has no batches for a task, as of `open_source`."""
    tasks = _TASKS.get(section.kind)
    if task in (None, LANGUAGE_MODEL) or tasks is None or task in tasks:
        return
    purpose = f"for {', '.join(tasks)}"
    why = f"data of kind {section.kind} has batches {purpose}, but this model is made for {task}"
    raise ConfigError(f"{why}; take kind: custom, with items that have the keys of the model's forward")


class PreparedSource:
    """A source with batches completed or renamed by `prepare` for a model's forward; the fingerprint is the same."""

    def __init__(self, source: Source, prepare: Callable[[Batch], Batch]) -> None:
        self.source = source
        self.prepare = prepare
        self.facts = source.facts
        self.fingerprint = source.fingerprint
        self.draws = source.draws

    def fetch(self, indices: Indices) -> Batch:
        return self.prepare(self.source.fetch(indices))


class ReferencedSource:
    """A source with numbers that were computed of each sample, `values` [samples, rows], as `companion` of a batch."""

    def __init__(self, source: Source, rows: int) -> None:
        self.source = source
        self.values = torch.zeros(source.facts.samples, rows)
        self.facts = source.facts
        self.fingerprint = source.fingerprint
        self.draws = source.draws

    def fetch(self, indices: Indices) -> Batch:
        return replace(self.source.fetch(indices), companion=self.values[indices.tolist()].flatten())


def skipping(
    source: Source, bad_samples: BadSamples, ranges: Sequence[tuple[int, int]] = (), *, later: bool = False
) -> Source:
    """Return a source that leaves out bad samples, `data.leave_out` (`ranges`), and others `later`.

    Raises ConfigError if there are no such samples, or too many.
    """
    skips = bad_samples.skips
    if not (skips or ranges or later):
        return source
    if (skips or ranges) and isinstance(source, ItemSource) and isinstance(source.dataset, WeightedDataset):
        why = "an index of a WeightedDataset is another sample in each epoch; give bad samples the weight 0"
        raise ConfigError(Problem("", "data.bad_samples.policy" if skips else "data.leave_out", why))
    known = dict.fromkeys(_indices_of(ranges, source.facts.samples), CONFIGURED)
    return SkippingSource(source, skips=skips, known=known, timeout=bad_samples.timeout)


def _indices_of(ranges: Sequence[tuple[int, int]], samples: int) -> list[int]:
    indices: set[int] = set()
    for first, last in map(sorted, ranges):
        if last >= samples:
            why = f"[{first}, {last}], but the last of the {samples:,} samples of data.train is {samples - 1}"
            raise ConfigError(Problem("", "data.leave_out", why))
        if last - first >= _MOST_LEFT_OUT or len(indices) > _MOST_LEFT_OUT:
            why = f"more than {_MOST_LEFT_OUT:,} samples; take them out of the dataset, which is then another one"
            raise ConfigError(Problem("", "data.leave_out", why))
        indices.update(range(first, last + 1))
    return sorted(indices)


def skipping_part(source: Source) -> SkippingSource | None:
    """Return what `skipping` has made of a source that may have been prepared since; None: nothing."""
    while isinstance(source, PreparedSource):
        source = source.source
    return source if isinstance(source, SkippingSource) else None


def renamed_inputs(names: Mapping[str, str | None], batch: Batch) -> Batch:
    """Return the batch with its inputs under the forward's names, by the data's; None: the input is removed.

    Raises ConfigError if the data has no such input.
    """
    if isinstance(batch.inputs, tuple):
        raise ConfigError(Problem("", "model.inputs", "the data's inputs are positional, without names; remove it"))
    missing = ", ".join(name for name in names if name not in batch.inputs)
    if missing:
        reason = f"the data has no input {missing}; it has {', '.join(batch.inputs)}"
        raise ConfigError(Problem("", "model.inputs", reason))
    renamed = {names.get(name, name): value for name, value in batch.inputs.items()}
    return replace(batch, inputs={name: value for name, value in renamed.items() if name is not None})
