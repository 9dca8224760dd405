"""`lockstep data prepare`: text is tokenised once and written where any number of runs can map it.

    files, globs, data sets --> documents --> tokenizer, end token --> FOLDER/train.tokens, .documents, .json
                                    \\-- every n-th document --------> FOLDER/held-out.tokens, ...

Everything is written beside its name and moved there when it is complete, the header last.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from lockstep.core.errors import ConfigError
from lockstep.core.local_paths import local_path
from lockstep.data.rows import check_columns, load_rows
from lockstep.data.tokenizers import load_tokenizer
from lockstep.data.tokens import FORMAT, Header, write_header

_ROWS = {".csv", ".parquet", ".json"}  # files of rows, read by the datasets library
_BATCH = 1000  # documents tokenised at a time
_BYTE_END = 256  # the end token of `bytes`


@dataclass(frozen=True, slots=True)
class _Tokenizer:
    """`encode` turns texts into ids, without special tokens."""

    name: str
    vocabulary: int
    end: int
    encode: Callable[[list[str]], list[np.ndarray[tuple[int], np.dtype[np.uint32]]]]


def prepare(
    inputs: Sequence[str],
    output: Path,
    *,
    tokenizer: str,
    split: str = "train",
    column: str = "text",
    configuration: str | None = None,
    held_out: int | None = None,
) -> dict[str, Header]:
    """Writes token files into the folder `output`.

    Args:
        inputs: text files or globs (one document a file), .jsonl, .json, .csv and .parquet files (one document a
            row), folders of the datasets library, or names of its data sets.
        output: made if it isn't there; what a split held before is replaced when the new one is complete.
        tokenizer: folder or hub name, or `bytes` (ids 0 to 255, end token 256).
        split: of data sets of the datasets library, with slices; token files are called after its first word.
        column: with the text.
        configuration: of a data set.
        held_out: every so many-th document goes to the split `held-out`; None: none does.

    Returns:
        The header of each split written.

    Raises:
        ConfigError: an input or the tokenizer is missing, or there are no documents.
    """
    if held_out is not None and held_out < 2:
        raise ConfigError(f"held_out {held_out} would hold out every document; every 20th is usual")
    tool = _tokenizer(tokenizer)
    name = split.partition("[")[0]
    names = [name] if held_out is None else [name, "held-out"]
    if len(set(names)) < len(names):
        raise ConfigError("held_out writes a split called held-out, which is what split is called already")
    missing = [folder for folder in (output, *output.parents) if not folder.exists()]
    output.mkdir(parents=True, exist_ok=True)
    writers = [_Writer(output, each, tool) for each in names]
    try:
        for number, document in enumerate(_documents(inputs, split, column, configuration)):
            held = held_out is not None and number % held_out == held_out - 1
            writers[held].add(document)
        return {writer.name: writer.finish() for writer in writers}
    finally:
        for writer in writers:
            writer.discard()
        _remove_empty(missing)


def _remove_empty(folders: Sequence[Path]) -> None:
    """From the innermost out, as far as nothing was written."""
    with suppress(OSError):  # it isn't empty
        for folder in folders:
            folder.rmdir()


# --- documents --------------------------------------------------------------------------------------------------


def _documents(inputs: Sequence[str], split: str, column: str, configuration: str | None) -> Iterator[str]:
    for given in inputs:
        path = local_path(given).expanduser()
        if path.is_dir():
            yield from _rows(given, configuration, split, column)
        elif files := ([path] if path.is_file() else sorted(Path(found) for found in glob.glob(given, recursive=True))):
            for file in files:
                if file.is_file():
                    yield from _of_file(file, column)
        elif any(sign in given for sign in "*?["):
            raise ConfigError(f"no file matches {given}")
        elif path.suffix:
            raise ConfigError(f"there is no file {given}")
        else:
            yield from _rows(given, configuration, split, column)


def _of_file(path: Path, column: str) -> Iterator[str]:
    if path.suffix == ".jsonl":
        yield from _of_lines(path, column)
    elif path.suffix in _ROWS:
        yield from _rows(str(path), None, "train", column)
    else:
        try:
            yield path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} is not text in UTF-8: {error}") from error


def _of_lines(path: Path, column: str) -> Iterator[str]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                yield json.loads(line)[column]
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{path}:{number}: no JSON object with a column {column} ({error!r})") from error


def _rows(name: str, configuration: str | None, split: str, column: str) -> Iterator[str]:
    rows = load_rows(name, configuration, split)
    check_columns(rows, [column])
    for batch in rows.select_columns([column]).iter(batch_size=_BATCH):
        yield from batch[column]


# --- tokens -----------------------------------------------------------------------------------------------------


def _tokenizer(name: str) -> _Tokenizer:
    if name == "bytes":
        return _Tokenizer("bytes", _BYTE_END + 1, _BYTE_END, _as_bytes)
    loaded = load_tokenizer(name)
    end = loaded.eos_token_id if loaded.eos_token_id is not None else loaded.sep_token_id
    if end is None:
        raise ConfigError(f"tokenizer {name} has no token (eos or sep) to end a document with")

    def encode(texts: list[str]) -> list[np.ndarray[tuple[int], np.dtype[np.uint32]]]:
        return [np.array(ids, dtype=np.uint32) for ids in loaded(texts, add_special_tokens=False)["input_ids"]]

    folder = Path(name).expanduser()  # runs may start elsewhere
    return _Tokenizer(str(folder.resolve()) if folder.is_dir() else name, len(loaded), int(end), encode)


def _as_bytes(texts: list[str]) -> list[np.ndarray[tuple[int], np.dtype[np.uint32]]]:
    return [np.frombuffer(text.encode(), dtype=np.uint8).astype(np.uint32) for text in texts]


# --- files ------------------------------------------------------------------------------------------------------


class _Writer:
    """One split, in the making."""

    def __init__(self, folder: Path, name: str, tokenizer: _Tokenizer) -> None:
        self.name = name
        self._folder = folder
        self._tokenizer = tokenizer
        self._dtype = np.dtype(np.uint16 if tokenizer.vocabulary <= 2**16 else np.uint32)
        self._waiting: list[str] = []
        self._offsets = [0]
        self._text_bytes = 0
        self._digest = hashlib.blake2b(digest_size=16)
        self._file: BinaryIO = self._draft("tokens").open("wb")

    def add(self, document: str) -> None:
        self._waiting.append(document)
        if len(self._waiting) == _BATCH:
            self._flush()

    def finish(self) -> Header:
        """The split exists from here on."""
        self._flush()
        if len(self._offsets) == 1:
            raise ConfigError(f"there is not one document for split {self.name}")
        offsets = np.array(self._offsets, dtype=np.int64)
        self._digest.update(offsets.data)
        self._draft("documents").write_bytes(offsets.tobytes())
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        header = self._header()
        (self._folder / f"{self.name}.json").unlink(missing_ok=True)  # until the new files are all in place
        for part in ("tokens", "documents"):
            os.replace(self._draft(part), self._folder / f"{self.name}.{part}")
        write_header(self._folder, self.name, header)
        return header

    def discard(self) -> None:
        """What is left of an unfinished split."""
        self._file.close()
        for part in ("tokens", "documents"):
            self._draft(part).unlink(missing_ok=True)

    def _draft(self, part: str) -> Path:
        return self._folder / f"{self.name}.{part}.part"

    def _flush(self) -> None:
        for text, ids in zip(self._waiting, self._tokenizer.encode(self._waiting), strict=True):
            block = np.append(ids, np.uint32(self._tokenizer.end)).astype(self._dtype)
            self._file.write(block.data)
            self._digest.update(block.data)
            self._offsets.append(self._offsets[-1] + len(block))
            self._text_bytes += len(text.encode())
        self._waiting.clear()

    def _header(self) -> Header:
        tokens = self._offsets[-1]
        return Header(
            format=FORMAT,
            dtype=self._dtype.name,
            tokens=tokens,
            documents=len(self._offsets) - 1,
            vocabulary=self._tokenizer.vocabulary,
            tokenizer=self._tokenizer.name,
            end=self._tokenizer.end,
            bytes_per_token=self._text_bytes / tokens,
            fingerprint=self._digest.hexdigest(),
        )
