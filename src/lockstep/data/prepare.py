"""Tokenize text once, into files that any number of runs can map (`lockstep data prepare`).

    files, globs, datasets  --> documents --> tokenizer, end token --> FOLDER/train.tokens, .documents, .json
                                    \\-- every n-th document --------> FOLDER/held-out.tokens, ...

All files are drafts until all are complete; then they are renamed, the headers last. Other processes that prepare the
same folder wait.
"""

from __future__ import annotations

import glob
import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from lockstep.core.cache_files import DISK_FULL, draft_of, locked, remove, remove_abandoned
from lockstep.core.errors import ConfigError
from lockstep.core.files import flush, naming
from lockstep.core.local_paths import local_path
from lockstep.data.columns import check_columns
from lockstep.data.hub import check_texts, end_token, load_rows, load_tokenizer
from lockstep.data.tokens import FORMAT, Header, write_header

_ROWS = {".csv", ".parquet", ".json"}  # files of rows, read by the datasets library
_LOCK, _DRAFT = ".prepare.lock", ".prepare"
_BATCH = 1000  # documents tokenized at a time
_MOST_SHOWN = 200  # characters of a reason
_BYTE_END = 256  # the end token of `bytes`
Ids = NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A tokenizer that encodes texts without special tokens."""

    name: str
    vocabulary: int
    end: int
    encode: Callable[[list[str]], list[Ids]]


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
    """Write token files into the folder `output`; return the header of each split. Raises ConfigError.

    Args:
        inputs: Text files or globs (one document a file), .jsonl, .json, .csv and .parquet files (one document a
            row), folders of the datasets library, or names of its datasets.
        tokenizer: Folder or hub name, or `bytes` (ids 0 to 255, end token 256).
        split: Split of datasets of the datasets library, with slices; its first word names the token files.
        held_out: Write every n-th document to the split `held-out`.
    """
    if held_out is not None and held_out < 2:
        raise ConfigError(f"held_out {held_out} would hold out every document; set 20 for every 20th")
    loaded = _tokenizer(tokenizer)
    names = [split.partition("[")[0], *(["held-out"] if held_out is not None else [])]
    if len(set(names)) < len(names):
        raise ConfigError("held_out writes a split named held-out, the same as split; give split another name")
    target = output / _DRAFT
    try:
        output.mkdir(parents=True, exist_ok=True)
        with locked(output / _LOCK, f"preparing {output}", stays=False) as show:
            remove_abandoned(target)
            draft = draft_of(target)
            draft.mkdir()
            try:
                documents = _documents(inputs, split, column, configuration)
                headers = write_splits(draft, names, loaded, documents, show, held_out)
                _publish(draft, output, names)
            finally:
                remove(draft)
            return headers
    except OSError as error:
        remedy = "; name a folder with space" if error.errno in DISK_FULL else ""
        raise ConfigError(f"{error.filename or output}: {error.strerror or error}{remedy}") from error


def write_splits(
    folder: Path,
    names: Sequence[str],
    tokenizer: Tokenizer,
    documents: Iterator[str],
    show: Callable[[str], None],
    held_out: int | None = None,
) -> dict[str, Header]:
    """Write splits of documents, every `held_out`-th to the second; return their headers. Raises OSError."""
    writers = [SplitWriter(folder, name, tokenizer) for name in names]
    try:
        for number, document in enumerate(documents):
            if number % _BATCH == 0:
                show(f"{number:,} documents")
            held = held_out is not None and number % held_out == held_out - 1
            writers[held].add(document)
        return {writer.name: writer.complete() for writer in writers}
    finally:
        for writer in writers:
            writer.close()


def _publish(draft: Path, output: Path, names: Sequence[str]) -> None:
    """Move complete splits, each header last: a split exists if its header does. Raises OSError."""
    for file in draft.iterdir():
        flush(file)
    for name in names:
        (output / f"{name}.json").unlink(missing_ok=True)  # until all new files are in place
    for part in ("tokens", "documents", "json"):
        for name in names:
            (draft / f"{name}.{part}").replace(output / f"{name}.{part}")
    flush(output)


def _documents(inputs: Sequence[str], split: str, column: str, configuration: str | None) -> Iterator[str]:
    for name in inputs:
        path = local_path(name).expanduser()
        files = [path] if path.is_file() else sorted(filter(Path.is_file, map(Path, glob.glob(name, recursive=True))))
        if files and not path.is_dir():
            for file in files:
                yield from _file_documents(file, column)
        elif any(sign in name for sign in "*?["):
            raise ConfigError(f"no file matches {name}")
        elif path.suffix and not path.is_dir():
            raise ConfigError(f"there is no file {name}")
        else:
            yield from _rows(name, configuration, split, column)


def _file_documents(path: Path, column: str) -> Iterator[str]:
    if path.suffix in _ROWS:
        yield from _rows(str(path), None, "train", column)
        return
    if path.suffix != ".jsonl":
        try:
            yield path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ConfigError(f"{path} isn't text in UTF-8: {error}") from error
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _document(line, f"{path}:{number}", column)


def _document(line: bytes, where: str, column: str) -> str:
    try:
        text = json.loads(line.decode("utf-8"))[column]
        text.encode("utf-8")  # no half of a surrogate pair
    except UnicodeError as error:
        raise ConfigError(f"{where} isn't text in UTF-8: {error}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reason = f"{type(error).__name__}: {str(error)[:_MOST_SHOWN]}"
        raise ConfigError(f"{where} isn't a JSON object with a text in the column {column} ({reason})") from error
    return cast("str", text)


def _rows(name: str, configuration: str | None, split: str, column: str) -> Iterator[str]:
    rows = load_rows(name, configuration, split)
    check_columns(rows.column_names, [column])
    where = name if local_path(name).expanduser().is_file() else f"dataset {name}, split {split}"
    return texts_of(rows, column, where)


def texts_of(rows: Any, column: str, where: str) -> Iterator[str]:
    """Yield the texts of a column of a datasets.Dataset. Raises ConfigError for a row without one."""
    first = 1
    for batch in rows.select_columns([column]).iter(batch_size=_BATCH):
        check_texts(batch[column], count(first), column, where)
        yield from batch[column]
        first += len(batch[column])


def _tokenizer(name: str) -> Tokenizer:
    if name == "bytes":
        as_bytes = lambda texts: [np.frombuffer(text.encode(), np.uint8).astype(np.uint32) for text in texts]  # noqa: E731
        return Tokenizer("bytes", _BYTE_END + 1, _BYTE_END, as_bytes)
    folder = Path(name).expanduser()  # runs may start in another folder
    return plain_tokenizer(str(folder.resolve()) if folder.is_dir() else name, load_tokenizer(name))


def plain_tokenizer(name: str, loaded: Any) -> Tokenizer:
    """Return a tokenizer of the transformers library. Raises ConfigError if it can't end a document."""
    if (end := end_token(loaded)) is None:
        raise ConfigError(f"tokenizer {name} has no token (eos or sep) to end a document with")

    def encode(texts: list[str]) -> list[Ids]:
        return [np.array(ids, dtype=np.uint32) for ids in loaded(texts, add_special_tokens=False)["input_ids"]]

    return Tokenizer(name, len(loaded), int(end), encode)


class SplitWriter:
    """A writer of a split's files in a folder."""

    def __init__(self, folder: Path, name: str, tokenizer: Tokenizer) -> None:
        self.name = name
        self._folder = folder
        self._tokenizer = tokenizer
        self._dtype = np.dtype(np.uint16 if tokenizer.vocabulary <= 2**16 else np.uint32)
        self._pending: list[str] = []
        self._offsets = [0]
        self._text_bytes = 0
        self._digest = hashlib.blake2b(digest_size=16)
        self._file = self._path("tokens").open("wb")

    def add(self, document: str) -> None:
        self._pending.append(document)
        if len(self._pending) == _BATCH:
            self._flush()

    def complete(self) -> Header:
        """Complete the files; return the split's header. Raises OSError."""
        self._flush()
        if len(self._offsets) == 1:
            raise ConfigError(f"there are no documents for split {self.name}")
        offsets = np.array(self._offsets, dtype=np.int64)
        self._digest.update(offsets.data)
        with naming(self._path("documents")):
            self._path("documents").write_bytes(offsets.tobytes())
        with naming(self._path("tokens")):
            self._file.close()
        tokens = self._offsets[-1]
        header = Header(
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
        write_header(self._folder, self.name, header)
        return header

    def close(self) -> None:
        with suppress(OSError):  # it tries once more to write what a full disk hasn't taken
            self._file.close()

    def _path(self, part: str) -> Path:
        return self._folder / f"{self.name}.{part}"

    def _flush(self) -> None:
        if not self._pending:  # tokenizers of transformers refuse an empty list
            return
        for text, ids in zip(self._pending, self._tokenizer.encode(self._pending), strict=True):
            block = np.append(ids, np.uint32(self._tokenizer.end)).astype(self._dtype)
            with naming(self._path("tokens")):
                self._file.write(block.data)
            self._digest.update(block.data)
            self._offsets.append(self._offsets[-1] + len(block))
            self._text_bytes += len(text.encode())
        self._pending.clear()
