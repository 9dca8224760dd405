"""Token streams of packed datasets: tokenized once on a machine or for a shared folder, and mapped by ranks and runs.

    $LOCKSTEP_CACHE/packed/KEY/tokens             uint32, all documents, each with its end token
                           KEY/header.json        the folder appears whole, under this name
                           KEY/fingerprint-512    of samples of a length; written when it is first needed
                           KEY.lock               locked by the process that tokenizes; holds what it has done so far
                           KEY@HOST@PID.part      unfinished; deleted by the next process, if its writer has ended

The default folder is ~/.cache/lockstep (or $XDG_CACHE_HOME/lockstep). Ranks wait for the lock and not in a collective,
so that no time limit applies. Where the folder can't be written, each rank keeps the tokens in its own memory.
"""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lockstep.core.cache_files import CACHE, DISK_FULL, cache_folder, locked, prints
from lockstep.core.drafts import draft_of, remove_abandoned
from lockstep.core.errors import ConfigError
from lockstep.core.files import MAX_JSON_BYTES, flush, read_bounded, write_atomically
from lockstep.core.formatting import size
from lockstep.core.terminal import echo
from lockstep.data import windows

FORMAT = 1
_FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)


@dataclass(frozen=True, slots=True)
class TokenBlock:
    """Some documents, tokenized.

    Attributes:
        ids: their tokens, end tokens included, uint32.
        text_bytes: of their text in UTF-8.
        documents: the number of documents up to and with these.
    """

    ids: NDArray[np.uint32]
    text_bytes: int
    documents: int


@dataclass(frozen=True, slots=True)
class TokenStream:
    """The tokens of all documents.

    Attributes:
        folder: of the cache, which holds them; None: they are in memory.
    """

    tokens: windows.Tokens
    text_bytes: int
    folder: Path | None

    def fingerprint(self, length: int) -> str:
        """Return the fingerprint of samples of this length: as long as the stream to make, so it is kept."""
        file = None if self.folder is None else self.folder / f"fingerprint-{length}"
        if file is not None:
            with suppress(OSError, UnicodeDecodeError):
                known = read_bounded(file, 64).decode()
                if re.fullmatch("[0-9a-f]{32}", known):
                    return known
        fingerprint = windows.fingerprint("packed", length, self.tokens)
        if file is not None:
            with suppress(OSError):
                write_atomically(file, fingerprint)
        return fingerprint


def cached_stream(key: str, blocks: Callable[[], Iterator[TokenBlock]], documents: int, name: str) -> TokenStream:
    """Return the stream of this key from the cache; the first process to need it writes it.

    Args:
        key: hash of all that the tokens depend on.
        blocks: tokenizes the documents, in order.
        documents: their number.
        name: of the dataset, for messages.

    Raises:
        ConfigError: The disk is full or fails.
    """
    folder = cache_folder("packed")
    if (stream := _read(folder / key)) is not None:
        return stream
    what = f"dataset {name}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with locked(folder / f"{key}.lock", f"tokenizing {what}") as show:
            stream = _read(folder / key)  # another process may have written it meanwhile
            if stream is None:
                _write(folder, key, _shown(blocks(), documents, show))
                stream = _read(folder / key)
    except OSError as error:
        if error.errno in _FORBIDDEN:
            return _in_memory(blocks(), folder, what)
        raise _not_written(error, folder, what) from error
    if stream is None:
        raise ConfigError(f"the tokens of {what} vanished from {folder} right after they were written; is it shared?")
    return stream


# --- files --------------------------------------------------------------------------------------------------------


def _read(entry: Path) -> TokenStream | None:
    """Return the stream in this folder; None if there is none, or it isn't whole."""
    try:
        header = json.loads(read_bounded(entry / "header.json", MAX_JSON_BYTES))
        count, text_bytes = int(header["tokens"]), int(header["text_bytes"])
        if header["format"] != FORMAT or count < 1 or (entry / "tokens").stat().st_size != 4 * count:
            return None
        tokens = np.memmap(entry / "tokens", dtype=np.uint32, mode="r", shape=(count,)).view(np.ndarray)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
    return TokenStream(tokens, text_bytes, entry)


def _write(folder: Path, key: str, blocks: Iterator[TokenBlock]) -> None:
    """Write the stream under a temporary name, and rename it when it is complete. Raises OSError."""
    entry = folder / key
    remove_abandoned(entry)
    draft = draft_of(entry)
    draft.mkdir()
    try:
        tokens = text_bytes = 0
        with (draft / "tokens").open("wb") as file:
            for block in blocks:
                file.write(block.ids.data)
                tokens += len(block.ids)
                text_bytes += block.text_bytes
        header = {"format": FORMAT, "tokens": tokens, "text_bytes": text_bytes}
        (draft / "header.json").write_text(json.dumps(header))
        for path in (draft / "tokens", draft / "header.json", draft):
            flush(path)
        _publish(draft, entry)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _publish(draft: Path, entry: Path) -> None:
    """Rename the draft, unless another process was first. What isn't whole under that name is removed."""
    with suppress(OSError):
        os.rename(draft, entry)
        flush(entry.parent)
        return
    if _read(entry) is None:
        shutil.rmtree(entry, ignore_errors=True)
        os.rename(draft, entry)


def _not_written(error: OSError, folder: Path, what: str) -> ConfigError:
    remedy = f"set {CACHE} to a folder with space"
    if error.errno not in DISK_FULL:
        return ConfigError(f"the tokens of {what} can't be written to {folder}: {error.strerror or error}; {remedy}")
    free = ""
    with suppress(OSError):
        free = f" ({size(shutil.disk_usage(folder).free)} free)"
    return ConfigError(f"the disk of {folder} is full{free}: the tokens of {what} don't fit; {remedy}")


def _in_memory(blocks: Iterator[TokenBlock], folder: Path, what: str) -> TokenStream:
    if prints():
        echo(
            f"lockstep: {folder} can't be written, so every rank tokenizes {what} at every start; set {CACHE} to a "
            "folder that you can write",
            file=sys.stderr,
            flush=True,
        )
    parts = list(blocks)
    tokens = np.concatenate([block.ids for block in parts])
    return TokenStream(tokens, sum(block.text_bytes for block in parts), None)


def _shown(blocks: Iterator[TokenBlock], documents: int, show: Callable[[str], None]) -> Iterator[TokenBlock]:
    for block in blocks:
        yield block
        show(f"{block.documents:,} of {documents:,} documents")
