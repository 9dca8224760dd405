"""A config of another tool, as it lies on the disk: which kind it is, and all that it says, key by key.

    args.json    {"output_dir": "out", "fsdp_config": {"min_num_params": 0}, ...}     trainer
                                |
    Said(("output_dir",), "out", args.json:2:17), Said(("fsdp_config", "min_num_params"), 0, ...), ...

Kinds are told by their words, so that no name of a file matters. Nothing that is read is executed: a pickle is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from lockstep.config import deepspeed_words
from lockstep.config.reading import Leaf, Node, Table, leaves, read_file, to_python
from lockstep.core.errors import ConfigError, Problem

Kind = Literal["yaml", "deepspeed", "trainer", "accelerate"]
KINDS: tuple[Kind, ...] = get_args(Kind)
NAMES: Mapping[Kind, str] = {
    "yaml": "a script's YAML",
    "deepspeed": "a DeepSpeed config",
    "trainer": "HF TrainingArguments",
    "accelerate": "Accelerate's config",
}


@dataclass(frozen=True, slots=True)
class Said:
    """One key of the file that holds no further keys.

    Attributes:
        path: the key and the sections it stands in, in the file's own spelling.
        value: as read; a list, too.
        where: file:line:column.
    """

    path: tuple[str, ...]
    value: object
    where: str

    @property
    def key(self) -> str:
        return ".".join(self.path)

    @property
    def word(self) -> str:
        return plain(self.path[-1])


@dataclass(frozen=True, slots=True)
class ForeignFile:
    path: Path
    kind: Kind
    said: tuple[Said, ...]


_MOST_KEYS = 1000


def plain(word: str) -> str:
    """A key as all tools would spell it."""
    return word.lower().replace("-", "_")


def read_foreign(path: Path, kind: Kind | None) -> ForeignFile:
    """Args:
        kind: None: as its words tell.

    Raises:
        ConfigError: the file can't be read, is no mapping, or is a pickle.
    """
    _refuse_pickle(path)
    tree, problems = read_file(path)
    if tree is None or problems:
        raise ConfigError(problems)
    if not tree.entries:
        raise ConfigError(Problem(str(path), "", "says nothing"))
    said = tuple(Said(way, _as_meant(node), node.where) for way, node in leaves(tree))
    if len(said) > _MOST_KEYS:
        why = f"has {len(said):,} keys, and a config of another tool {_MOST_KEYS:,} at most; leave out what is data"
        raise ConfigError(Problem(str(path), "", why))
    return ForeignFile(path, kind or _kind(tree), said)


def _as_meant(node: Node) -> object:
    """These files are written for readers of YAML 1.1, to whom a bare `no` is false."""
    if isinstance(node, Leaf) and node.text is not None:
        return _SWITCHES_OF_YAML_1_1.get(node.text, node.value)
    return to_python(node)


_SWITCHES_OF_YAML_1_1 = {
    spelt: value
    for word, value in (("yes", True), ("no", False), ("on", True), ("off", False))
    for spelt in (word, word.capitalize(), word.upper())
}


def _kind(tree: Table) -> Kind:
    keys = {plain(key) for key in tree.entries}
    sections = {plain(key) for key, entry in tree.entries.items() if isinstance(entry.node, Table)}
    if keys & _OF_ACCELERATE_ALONE:
        return "accelerate"
    if keys & _OF_DEEPSPEED_ALONE and 2 * len(keys & deepspeed_words.TOP) > len(keys):  # one may be misspelt
        return "deepspeed"
    if len((keys - sections) & _OF_TRAINER_ALONE) >= 2 and sections <= _SECTIONS_OF_TRAINER:
        return "trainer"
    return "yaml"


_OF_ACCELERATE_ALONE = {"compute_environment", "distributed_type", "downcast_bf16", "main_training_function"}
_OF_DEEPSPEED_ALONE = {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "steps_per_print"}
_OF_TRAINER_ALONE = {
    "output_dir", "per_device_train_batch_size", "per_device_eval_batch_size", "num_train_epochs", "lr_scheduler_type",
    "eval_strategy", "evaluation_strategy", "save_strategy", "logging_strategy", "logging_steps", "save_steps",
    "save_total_limit", "adam_beta2",
}  # fmt: skip
_SECTIONS_OF_TRAINER = {
    "fsdp_config", "deepspeed", "accelerator_config", "parallelism_config", "liger_kernel_config",
    "lr_scheduler_kwargs", "gradient_checkpointing_kwargs", "activation_checkpointing_kwargs",
}  # fmt: skip


def _refuse_pickle(path: Path) -> None:
    try:
        with path.open("rb") as file:
            begins = file.read(2)
    except OSError as error:
        raise ConfigError(Problem(str(path), "", f"can't be read: {error.strerror}")) from error
    if begins == b"PK" or begins[:1] == b"\x80":
        why = (
            "is a pickle, and reading one runs what is in it; where it was made, write the same as JSON: "
            'Path("training_args.json").write_text(training_args.to_json_string())'
        )
        raise ConfigError(Problem(str(path), "", why))
