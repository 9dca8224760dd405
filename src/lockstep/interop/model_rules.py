"""Rules for models and data, which a file may only name.

model_name_or_path: gpt2        model.kind: huggingface, model.pretrained: gpt2
hidden_size: 256                model.width: 256 of Lockstep's transformer, if the file doesn't name a model
dataset_name: wikitext          data.train.kind: huggingface, data.train.name: wikitext
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lockstep.interop.foreign import ForeignFile, ForeignKey, plain
from lockstep.interop.keys import Answer, KeyRow, derived, keys_for, not_there, taken, to_do
from lockstep.interop.rules import Rule

_TASKS = ("causal-lm", "masked-lm", "seq2seq", "sequence-classification")
_NOT_TRANSFORMERS = (
    "resnet", "vgg", "densenet", "mobilenet", "efficientnet", "alexnet", "mlp", "cnn", "simple", "toy", "unet",
)  # fmt: skip
_NOT_ON_THE_HUB = ("cifar", "mnist", "imagenet", "synthetic", "random", "dummy", "fake", "toy")
_FILES = (".txt", ".csv", ".json", ".jsonl", ".parquet", ".bin")
_SHAPE = ("n_layer", "n_layers", "num_layers", "num_hidden_layers", "n_embd", "hidden_size", "d_model", "hidden_dim")


def named_model(file: ForeignFile) -> ForeignKey | None:
    return file.find(*keys_for("model", "model.pretrained"))


def _is_on_the_hub(key: ForeignKey | None) -> bool:
    return key is not None and isinstance(key.value, str) and not key.value.lower().startswith(_NOT_TRANSFORMERS)


def model(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    if not isinstance(key.value, str):
        return not_there("it must be a name")
    if not _is_on_the_hub(key):
        return to_do("write model: {kind: custom, target: 'file.py:Name'}, with the function that builds it")
    return Answer("taken", {"model.kind": "huggingface", row.target: key.value})


def task(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    name = plain(str(key.value)).replace("_", "-")
    if name not in _TASKS or not _is_on_the_hub(named_model(file)):
        return to_do("write model.kind and, for huggingface, model.task")
    return taken(row.target, name)


def shape(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    """Convert a size of a model without a name: Lockstep's transformer, or that of `model_type`."""
    if named_model(file) is not None:
        return to_do("the named model determines it; to change it, write model.architecture")
    if file.find("model_type") is not None:
        return taken(f"model.architecture.{key.path[-1]}", key.value)
    if row.target in ("model.dropout", "") and file.find(*_SHAPE) is None:
        return to_do("write it as an argument of your model: model.arguments")
    return derived("for Lockstep's transformer", {"model.kind": "transformer", row.target: key.value})


def dataset(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    name = str(key.value)
    if name.lower().startswith(_NOT_ON_THE_HUB):
        return to_do("write data.train: {kind: custom, target: 'file.py:Name'}, with the class of the Dataset")
    if not _is_hub_dataset(name):
        return to_do("tokenize it (lockstep data prepare), then write data.train: {kind: tokens, folder: FOLDER}")
    return Answer("taken", {"data.train.kind": "huggingface", row.target: name})


def _is_hub_dataset(name: str) -> bool:
    return (
        not name.lower().startswith(_NOT_ON_THE_HUB) and name[:1] not in (".", "/") and Path(name).suffix not in _FILES
    )


def data_key(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    """Convert a key of data.train for a dataset of the hub; `block_size` packs documents into blocks."""
    kind, name = file.value("data.train.kind"), file.value(*keys_for("dataset", "data.train.name"))
    if kind is None and (name is None or not _is_hub_dataset(str(name))):
        places = "data.train.max_length (huggingface) or length (tokens)"
        return to_do(f"write it with data.train.kind, as {places if row.target.endswith('max_length') else row.target}")
    if kind not in (None, "huggingface") and row.target == "data.train.max_length":
        return taken("data.train.length", key.value)
    if key.word == "block_size":
        return derived("documents are packed into blocks", {row.target: key.value, "data.train.packed": True})
    return taken(row.target, key.value)


MODEL_RULES: Mapping[str, Rule] = {
    "model": model, "task": task, "shape": shape, "dataset": dataset, "data key": data_key,
}  # fmt: skip
