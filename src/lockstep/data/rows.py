"""Rows of the datasets library: from a folder, a file, or by name from the cache or the hub.

FOLDER saved by save_to_disk      its split
FOLDER of files, or one file      json, jsonl, csv, parquet, txt
name (and configuration)          cache or hub; without a network only the cache is asked, at once
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.core.distribution import pip_install
from lockstep.core.errors import ConfigError
from lockstep.core.hub import missing, needs_hub
from lockstep.core.out_of_memory import ran_out

_BUILDERS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet", ".txt": "text", ".text": "text"}


def load_rows(name: str, configuration: str | None, split: str) -> Any:
    """A datasets.Dataset.

    Raises:
        ConfigError: the library, the data or the split is missing.
    """
    _import_datasets()
    path = Path(name).expanduser()
    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            return _from_disk(path, split)
        return _load(path, name, configuration, split)
    except ConfigError:
        raise
    except Exception as error:  # the library raises many kinds, of its own and of those beneath it
        if ran_out(error):
            raise
        if path.exists():
            raise ConfigError(f"data set {name}, split {split}, can't be read: {error}") from error
        raise missing("data set", name, error) from error


def check_columns(rows: Any, wanted: Sequence[str]) -> None:
    """Raises ConfigError for the first column that isn't there, with those that are."""
    for column in wanted:
        if column not in rows.column_names:
            near = difflib.get_close_matches(column, rows.column_names, n=1)
            guess = f"; did you mean {near[0]}?" if near else ""
            raise ConfigError(f"the data set has no column {column}{guess} Its columns: {', '.join(rows.column_names)}")


def _load(path: Path, name: str, configuration: str | None, split: str) -> Any:
    from datasets import load_dataset

    if path.is_file():
        if path.suffix not in _BUILDERS:
            known = ", ".join(_BUILDERS)
            raise ConfigError(f"{name}: files of kind {path.suffix or '(none)'} can't be read; known are {known}")
        return load_dataset(_BUILDERS[path.suffix], data_files=str(path), split=split)
    if path.is_dir():
        return load_dataset(str(path), configuration, split=split)
    if path.suffix in _BUILDERS or name.startswith(("/", ".", "~")):
        raise ConfigError(f"there is no file or folder {path}")
    needs_hub()
    return load_dataset(name, configuration, split=split)


def _from_disk(path: Path, split: str) -> Any:
    from datasets import DatasetDict, ReadInstruction, load_from_disk

    saved = load_from_disk(str(path))
    splits = saved if isinstance(saved, DatasetDict) else {str(saved.split or "train"): saved}
    parts = ReadInstruction.from_spec(split).to_absolute({name: len(rows) for name, rows in splits.items()})
    if len(parts) != 1:
        raise ConfigError(f"split {split}: one split of a saved data set can be read, this names {len(parts)}")
    part = parts[0]
    return splits[part.splitname].select(
        range(part.from_ or 0, len(splits[part.splitname]) if part.to is None else part.to)
    )


def _import_datasets() -> None:
    try:
        import datasets
    except ImportError as error:
        raise ConfigError(f"this needs the datasets library, which is not installed: {pip_install('hf')}") from error
    datasets.disable_progress_bars()
