"""The columns of a local file of data, without reading it whole or importing a library for datasets.

csv --> its head and first row    json, jsonl --> the keys of its first 10 MB    parquet --> its schema and first row
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.config.schema import Config, HuggingFaceData
from lockstep.core.closest import closest_match
from lockstep.core.errors import ConfigError, Problem

OF_LISTS = ("token-classification", "multiple-choice")
"""Tasks with lists of texts in a column."""
_BLOCK = 10 << 20  # of JSON; all its keys are columns for the datasets library, too


def first_row(name: str) -> Mapping[str, Any]:
    """Return columns with their first values; empty if it isn't such a file, or can't be read."""
    path = Path(name).expanduser()
    if not path.is_file():
        return {}
    try:
        if path.suffix == ".parquet":
            return _of_parquet(path)
        if path.suffix not in (".csv", ".json", ".jsonl"):
            return {}
        with path.open("rb") as file:
            text = file.read(_BLOCK).decode("utf-8-sig", "replace")
        if path.suffix != ".csv":
            return _of_json(text)
        rows = csv.reader(io.StringIO(text))
        names, values = next(rows, []), next(rows, [])
        return dict.fromkeys(names, "") | dict(zip(names, values, strict=False))
    except (OSError, ValueError, csv.Error, RecursionError):
        return {}


def _of_json(text: str) -> Mapping[str, Any]:
    row: dict[str, Any] = {}
    decoder, place = json.JSONDecoder(), text.find("{")
    while place >= 0:
        try:
            record, end = decoder.raw_decode(text, place)
        except ValueError:  # the block has its beginning only
            break
        row = record | row
        place = text.find("{", end)
    return row


def _of_parquet(path: Path) -> Mapping[str, Any]:
    try:
        from pyarrow.parquet import ParquetFile
    except ImportError:
        return {}
    file = ParquetFile(path)
    rows = next(file.iter_batches(batch_size=1), None)
    return dict.fromkeys(file.schema_arrow.names) if rows is None else dict(*rows.to_pylist())


def columns_of(section: HuggingFaceData) -> list[str]:
    """Return the columns that a section reads."""
    texts = (section.text, *pair_columns(section)) if section.messages is None else (section.messages,)
    content = texts if section.image is None else (section.image,)
    named = (*content, section.label, section.rejected, section.desirable, section.tools, section.system_column)
    return [column for column in named if column is not None]


def ratings(rows: Any, column: str, name: str) -> list[bool]:
    """Return the values of a dataset's column that rates answers. Raises ConfigError for one that is no rating."""
    values = list(rows[column])
    for number, value in enumerate(values, 1):
        if value not in (True, False):
            why = f"has {value!r:.40} in the column {column}; write true, or 1, for a desirable answer, else false"
            raise ConfigError(f"dataset {name}, row {number:,} {why}")
    return list(map(bool, values))


def pair_columns(section: HuggingFaceData) -> tuple[str, ...]:
    """Return the columns of `text_pair`."""
    pair = section.text_pair
    return pair if isinstance(pair, tuple) else () if pair is None else (pair,)


def check_columns(known: Sequence[str], columns: Sequence[str]) -> None:
    """Raise ConfigError for the first of the columns that isn't known."""
    for column in columns:
        if column not in known:
            near = closest_match(column, known)
            hint = f"; did you mean {near}?" if near else "."
            raise ConfigError(f"the dataset has no column {column}{hint} Its columns: {', '.join(known)}")


def check_first_texts(row: Mapping[str, Any], columns: Sequence[str]) -> None:
    """Raise ConfigError if a column doesn't hold text."""
    for column in columns:
        value = row[column]
        if value is None or isinstance(value, str):  # a row without a text is reported when it is read
            continue
        if is_chat(value):
            content = f"messages; to train on conversations, write messages: {column} instead"
        else:
            content = f"{value!r:.60}, a {type(value).__name__}; text is needed"
        raise ConfigError(f"column {column} has {content}")


def is_chat(value: object) -> bool:
    """Return whether a value is a list of messages."""
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def check_local_columns(config: Config) -> None:
    """Raise ConfigError for columns that the local files of the datasets library's kind don't have."""
    problems = []
    sets = {"data.train": config.data.train, **{f"data.evaluation.{n}": s for n, s in config.data.evaluation.items()}}
    for key, section in sets.items():
        if section.kind != "huggingface" or not (row := first_row(section.name)):
            continue
        try:
            check_columns([*row], columns_of(section))
            task = getattr(config.model, "task", None)
            if section.messages is None and section.image is None and task not in OF_LISTS:
                check_first_texts(row, [section.text, *pair_columns(section)])
            elif section.messages and section.label is None and isinstance(row[section.messages], str):
                why = "has text, and conversations are lists of messages"
                remedy = "write it as text, or name the column with answers as label"
                raise ConfigError(f"column {section.messages} {why}; {remedy}")
        except ConfigError as error:
            problems.append(Problem("", key, str(error)))
    if problems:
        raise ConfigError(problems)
