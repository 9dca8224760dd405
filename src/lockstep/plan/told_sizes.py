"""What a config alone tells of its data, so that a plan needs neither the data set nor a network.

data       on the hub, or token files that are not here yet; what lies here is read
model      states its own sizes: vocabulary, classes
run        has steps, samples or tokens; the length of an epoch stands in the data alone
"""

from __future__ import annotations

from pathlib import Path

from lockstep.config.schema import (
    Config,
    HuggingFaceData,
    HuggingFaceModel,
    ImageClassifierModel,
    TextClassifierModel,
    Tokens,
    TransformerModel,
)
from lockstep.core.records import DataFacts

NOT_READ = "data.train was not read: the run is taken for one epoch, and the vocabulary and classes are the config's."


def facts_of_config(config: Config) -> DataFacts | None:
    """The facts that planning needs; None if the data set itself has to be read."""
    if _lies_here(config) or not _model_states_sizes(config):
        return None
    per_sample = _tokens_per_sample(config)
    samples = _samples_of_run(config, per_sample)
    return None if samples is None else DataFacts(samples, per_sample)


def _lies_here(config: Config) -> bool:
    match config.data.train:
        case HuggingFaceData(name=name):
            return Path(name).expanduser().exists()
        case Tokens(folder=folder):
            return Path(folder).expanduser().exists()
    return True


def _model_states_sizes(config: Config) -> bool:
    match config.model:
        case HuggingFaceModel() as model:
            asked = model.architecture or {}
            has_vocabulary = model.pretrained is not None or "vocab_size" in asked
            has_classes = model.task != "sequence-classification" or model.classes is not None or "num_labels" in asked
            return has_vocabulary and has_classes
        case TransformerModel(vocabulary=vocabulary):
            return vocabulary is not None
        case TextClassifierModel(vocabulary=vocabulary, classes=classes):
            return vocabulary is not None and classes is not None
        case ImageClassifierModel(classes=classes):
            return classes is not None
    return True


def _tokens_per_sample(config: Config) -> int | None:
    match config.data.train:
        case HuggingFaceData(packed=True, max_length=length) | Tokens(length=length):
            return length
    return None


def _samples_of_run(config: Config, per_sample: int | None) -> int | None:
    run = config.run
    if run.steps is not None:
        return run.steps * config.batch.global_size
    if run.samples is not None:
        return run.samples
    return -(-run.tokens // per_sample) if run.tokens is not None and per_sample is not None else None
