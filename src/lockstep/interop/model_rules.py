"""How another tool's value becomes ours: models and data, which a file may only name.

model_name_or_path: gpt2        model.kind: huggingface, model.pretrained: gpt2
hidden_size: 256                model.width: 256 of Lockstep's transformer, if the file names no model
dataset_name: wikitext          data.train.kind: huggingface, data.train.name: wikitext
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from lockstep.interop.foreign import (
    NOTHING,
    Answer,
    ForeignFile,
    ForeignKey,
    derived,
    not_needed,
    not_there,
    plain,
    taken,
    to_do,
)
from lockstep.interop.keys import KeyRow
from lockstep.interop.rules import Rule, keys_for

_TASKS = {
    "causallm": "causal-lm", "clm": "causal-lm", "languagemodeling": "causal-lm", "textgeneration": "causal-lm",
    "lm": "causal-lm", "maskedlm": "masked-lm", "mlm": "masked-lm", "fillmask": "masked-lm", "seq2seq": "seq2seq",
    "seq2seqlm": "seq2seq", "translation": "seq2seq", "summarization": "seq2seq",
    "sequenceclassification": "sequence-classification", "textclassification": "sequence-classification",
    "classification": "sequence-classification", "seqcls": "sequence-classification",
}  # fmt: skip
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
        return not_there("a name")
    if not _is_on_the_hub(key):
        return to_do("write model: {kind: custom, target: 'file.py:Name'}, naming what makes it")
    return Answer("taken", {"model.kind": "huggingface", row.ours: key.value})


def task(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    name = plain(str(key.value)).replace("_", "").removeprefix("automodelfor").removeprefix("for").replace(" ", "")
    if name not in _TASKS or not _is_on_the_hub(named_model(file)):
        return to_do("write model.kind, and for huggingface model.task")
    return taken(row.ours, _TASKS[name])


def labels(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    if not _is_on_the_hub(named_model(file)):
        return to_do("it follows from the data; to change it, write model.classes beside model.kind")
    return Answer("taken", {row.ours: key.value, "model.task": "sequence-classification"})


def shape(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    """A size of a model that has no name: Lockstep's transformer, or what `model_type` names."""
    if named_model(file) is not None:
        return to_do("the named model has its shape; to change it, write model.architecture")
    if file.find("model_type") is not None:
        return taken(f"model.architecture.{key.path[-1]}", key.value)
    if row.ours in ("model.dropout", "") and file.find(*_SHAPE) is None:
        return to_do("write it where your model is made: model.arguments")
    return derived("for Lockstep's transformer", {"model.kind": "transformer", row.ours: key.value})


def bias(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    if named_model(file) is not None or file.find(*_SHAPE) is None:
        return shape(row, key, file)
    if not key.value:
        return not_needed("Lockstep's transformer has none")
    return not_there("Lockstep's transformer has none; write false")


def model_type(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    if named_model(file) is not None:
        return not_needed("the named model has its type")
    return Answer("taken", {"model.kind": "huggingface", row.ours: key.value})


def attention(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    if key.value == "auto":
        return NOTHING
    if named_model(file) is None and file.find("model_type") is None:
        return to_do(f"write {row.ours}: {key.value} beside a model of kind huggingface")
    return taken(row.ours, key.value)


def dataset(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    name = str(key.value)
    if name.lower().startswith(_NOT_ON_THE_HUB):
        return to_do("write data.train: {kind: custom, target: 'file.py:Name'}, naming what makes the Dataset")
    if name.startswith((".", "/")) or Path(name).suffix in _FILES:
        return to_do("turn it into tokens (lockstep data prepare), then data.train: {kind: tokens, folder: FOLDER}")
    return Answer("taken", {"data.train.kind": "huggingface", row.ours: name})


def _hub_dataset(file: ForeignFile) -> str | None:
    """Return the name of the training set, where it is one of the hub."""
    key = file.find(*keys_for("dataset", "data.train.name"))
    name = None if key is None else str(key.value)
    if name is None or name.lower().startswith(_NOT_ON_THE_HUB) or name.startswith((".", "/")):
        return None
    return None if Path(name).suffix in _FILES else name


def data_key(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    """A key of data.train, where that is a set of the hub; `block_size` joins documents and cuts them into blocks."""
    kind = file.value("data.train.kind")
    if kind is None and _hub_dataset(file) is None:
        places = "data.train.max_length (huggingface) or length (tokens)"
        return to_do(f"write it beside data.train.kind, as {places if row.ours.endswith('max_length') else row.ours}")
    if kind not in (None, "huggingface") and row.ours == "data.train.max_length":
        return taken("data.train.length", key.value)
    if key.word == "block_size":
        return derived("documents are joined and cut", {row.ours: key.value, "data.train.packed": True})
    return taken(row.ours, key.value)


def evaluation_split(row: KeyRow, key: ForeignKey, file: ForeignFile) -> Answer:
    name = _hub_dataset(file)
    if name is None:
        return to_do("write a set under data.evaluation")
    plain_name = str(key.value).replace("_", "").replace("-", "").isalnum()
    place = f"{row.ours}.{key.value if plain_name else 'held-out'}"
    settings: dict[str, object] = {f"{place}.kind": "huggingface", f"{place}.name": name, f"{place}.split": key.value}
    for same in ("configuration", "text", "label", "max_length"):
        value = file.value(*keys_for("data key", f"data.train.{same}"))
        if value is not None:
            settings[f"{place}.{same}"] = value
    if file.find("block_size") is not None:
        settings[f"{place}.packed"] = True
    return derived("as data.train, of that split", settings)


MODEL_RULES: Mapping[str, Rule] = {
    "model": model, "task": task, "labels": labels, "shape": shape, "bias": bias, "model type": model_type,
    "attention": attention, "dataset": dataset, "data key": data_key, "evaluation split": evaluation_split,
}  # fmt: skip
