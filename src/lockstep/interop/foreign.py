"""Read a config of another tool: its kind, which follows from its keys, and all its keys. Nothing is executed.

args.json    {"output_dir": "out", "fsdp_config": {"min_num_params": 0}, ...}     trainer
ForeignKey(("output_dir",), "out", args.json:2:17), ForeignKey(("fsdp_config", "min_num_params"), 0, ...), ...
"""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast, get_args

from lockstep.config.deepspeed_keys import keys_of
from lockstep.config.reading import MOST_BYTES, Leaf, Node, Table, from_python, leaves, read_file, to_python
from lockstep.core.errors import ConfigError, Problem
from lockstep.core.files import read_bounded

ForeignKind = Literal["yaml", "deepspeed", "trainer", "accelerate"]
KINDS: tuple[ForeignKind, ...] = get_args(ForeignKind)
NAMES: Mapping[ForeignKind, str] = {
    "yaml": "a script's config",
    "deepspeed": "a DeepSpeed config",
    "trainer": "HF TrainingArguments",
    "accelerate": "Accelerate's config",
}
_MOST_KEYS = 1000


def plain(word: str) -> str:
    """Return a key in a spelling common to all tools."""
    return word.lower().replace("-", "_")


@dataclass(frozen=True, slots=True)
class ForeignKey:
    """A key of the file that holds no further keys, with its sections, in the file's spelling, and its place."""

    path: tuple[str, ...]
    value: object
    where: str = ""

    @property
    def key(self) -> str:
        return ".".join(self.path)

    @property
    def word(self) -> str:
        return plain(self.path[-1])

    @property
    def section(self) -> str:
        return plain(self.path[-2]) if len(self.path) > 1 else ""

    def ends_with(self, word: str) -> bool:
        """Return whether the key is `word`, or `section.word`."""
        return f".{plain(self.key)}".endswith(f".{word}")


@dataclass(frozen=True, slots=True)
class ForeignFile:
    """Another tool's config; `ranks` is the number of ranks that its numbers are meant for, if known."""

    path: Path
    kind: ForeignKind
    keys: tuple[ForeignKey, ...]
    ranks: int | None = None

    def find(self, *words: str) -> ForeignKey | None:
        """Return the first of these words (or `section.word`) that has a value."""
        for word in words:
            for key in self.keys:
                if key.value not in (None, "auto") and key.ends_with(word):
                    return key
        return None

    def value(self, *words: str) -> object:
        key = self.find(*words)
        return None if key is None else key.value

    def number(self, *words: str) -> int | None:
        """Return the value, if it is a whole number above 0."""
        value = self.value(*words)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    def has_section(self, *names: str) -> bool:
        return any(plain(part) in names for key in self.keys for part in key.path[:-1])


def is_off(value: object) -> bool:
    """Return whether a value requests nothing: a switch that is off, an empty list, a size of 1."""
    if isinstance(value, bool):
        return not value
    return value in (None, "", 0, 1, [], {}, "no", "none", "auto")


def read_foreign(path: Path, kind: ForeignKind | None) -> ForeignFile:
    """Read another tool's config, of this kind or the one that its keys suggest. Raises ConfigError."""
    _refuse_pickle(path)
    tree, problems = _read_toml(path) if path.suffix.lower() == ".toml" else read_file(path)
    if tree is None or problems:
        raise ConfigError(problems)
    if not tree.entries:
        raise ConfigError(Problem(str(path), "", "is empty"))
    keys = tuple(ForeignKey(way, as_yaml_1_1(node), node.where) for way, node in leaves(tree))
    if len(keys) > _MOST_KEYS:
        why = f"has {len(keys):,} keys, but a config of another tool has at most {_MOST_KEYS:,}; leave out data"
        raise ConfigError(Problem(str(path), "", why))
    return ForeignFile(path, kind or _kind(tree), keys)


def _read_toml(path: Path) -> tuple[Table | None, list[Problem]]:
    try:
        values = tomllib.loads(read_bounded(path, MOST_BYTES).decode())
    except (OSError, ValueError) as error:
        return None, [Problem(str(path), "", f"is no TOML that can be read: {error}")]
    return cast("Table", from_python(values, str(path))), []


def as_yaml_1_1(node: Node) -> object:
    """Return the value as a YAML 1.1 reader, which the other tools use, sees it: an unquoted `no` is false."""
    if isinstance(node, Leaf) and node.text is not None and node.text in _SWITCHES_OF_YAML_1_1:
        return _SWITCHES_OF_YAML_1_1[node.text]
    return to_python(node)


_SWITCHES_OF_YAML_1_1 = {
    spelling: value
    for word, value in (("yes", True), ("no", False), ("on", True), ("off", False))
    for spelling in (word, word.capitalize(), word.upper())
}
_ACCELERATE_ONLY = {"compute_environment", "distributed_type", "downcast_bf16", "main_training_function"}
_DEEPSPEED_ONLY = {"zero_optimization", "train_micro_batch_size_per_gpu", "train_batch_size", "steps_per_print"}
_TRAINER_ONLY = {
    "output_dir", "per_device_train_batch_size", "per_device_eval_batch_size", "num_train_epochs", "lr_scheduler_type",
    "eval_strategy", "evaluation_strategy", "save_strategy", "logging_strategy", "logging_steps", "save_steps",
    "save_total_limit", "adam_beta2",
}  # fmt: skip
_TRAINER_SECTIONS = {
    "fsdp_config", "deepspeed", "accelerator_config", "parallelism_config", "liger_kernel_config",
    "lr_scheduler_kwargs", "gradient_checkpointing_kwargs", "activation_checkpointing_kwargs",
}  # fmt: skip


def _kind(tree: Table) -> ForeignKind:
    keys = {plain(key) for key in tree.entries}
    sections = {plain(key) for key, entry in tree.entries.items() if isinstance(entry.node, Table)}
    if keys & _ACCELERATE_ONLY:
        return "accelerate"
    if keys & _DEEPSPEED_ONLY and 2 * len(keys & set(keys_of(""))) > len(keys):
        return "deepspeed"
    strays = sections - _TRAINER_SECTIONS
    if len((keys - sections) & _TRAINER_ONLY) >= 2 + len(strays) and len(strays) <= 1:
        return "trainer"
    return "yaml"


def _refuse_pickle(path: Path) -> None:
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # a pipe would keep its reader waiting
            start = file.read(2) or b""
    except OSError as error:
        raise ConfigError(Problem(str(path), "", f"can't be read: {error.strerror}")) from error
    if start == b"PK" or start[:1] == b"\x80":
        why = "is a pickle, which can execute code; write JSON where it was made: training_args.to_json_string()"
        raise ConfigError(Problem(str(path), "", why))
