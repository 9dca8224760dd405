"""Facts about data that a config has by itself, so that a plan needs no dataset and no network."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.config.schema import (
    HuggingFaceData,
    HuggingFaceModel,
    ImageClassifierModel,
    TextClassifierModel,
    Tokens,
    TransformerModel,
)
from lockstep.core.records import DataFacts
from lockstep.core.tasks import TASKS

if TYPE_CHECKING:
    from lockstep.config.schema import Config, DataSource, Model


def facts_of_config(config: Config) -> DataFacts | None:
    """Return the facts that planning needs; None if the dataset has to be read."""
    sizes, run = sizes_of_config(config), config.run
    if sizes is None:
        return None
    per_sample = sizes.tokens_per_sample
    if run.steps is not None:
        return DataFacts(run.steps * config.batch.global_size, per_sample)
    if run.samples is not None:
        return DataFacts(run.samples, per_sample)
    if run.tokens is not None and per_sample is not None:
        return DataFacts(-(-run.tokens // per_sample), per_sample)
    return None


def sizes_of_config(config: Config) -> DataFacts | None:
    """Return facts that suffice for the sizes of a step; None if data has to be read."""
    data = config.data.train
    if _is_local(data) or not model_states_sizes(config.model):
        return None
    match data:
        case HuggingFaceData(packed=True | "whole", max_length=length) | Tokens(length=length):
            return DataFacts(config.batch.global_size, length)
    return DataFacts(config.batch.global_size, None)


def _is_local(data: DataSource) -> bool:
    match data:
        case HuggingFaceData(name=path) | Tokens(folder=path):
            return Path(path).expanduser().exists()
    return True


def model_states_sizes(model: Model) -> bool:
    """Return whether the model's section has the sizes that data would give otherwise."""
    match model:
        case HuggingFaceModel():
            keys = model.architecture or {}
            has_vocabulary = model.pretrained is not None or "vocab_size" in keys
            has_classes = not TASKS[model.task].classifies or model.classes is not None or "num_labels" in keys
            return has_vocabulary and has_classes
        case TransformerModel(vocabulary=vocabulary):
            return vocabulary is not None
        case TextClassifierModel(vocabulary=vocabulary, classes=classes):
            return vocabulary is not None and classes is not None
        case ImageClassifierModel(classes=classes):
            return classes is not None
    return True
