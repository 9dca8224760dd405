"""Token files in an object store: each host downloads a split once, verified, and maps it into memory.

s3://bucket/books/train.json     read at every start: its hash names the copy
              /train.tokens      downloaded in ranges to ~/.cache/lockstep/tokens/HASH, hashed, renamed
              /train.documents

The first process of a host that needs the split downloads it; the others wait for its lock, and not in a collective.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.core.cache_files import DISK_FULL, cache_folder, cache_remedy, locked
from lockstep.core.drafts import draft_of, remove, remove_abandoned
from lockstep.core.errors import ConfigError
from lockstep.core.files import MAX_JSON_BYTES, flush, naming
from lockstep.core.formatting import size as size_text
from lockstep.stores.opening import open_store

if TYPE_CHECKING:
    from lockstep.stores.blobs import BlobStore

_RANGE_BYTES = 2**24
_THREADS = 4
_HASHED_BYTES = 2**22


def downloaded_header(address: str, split: str) -> bytes:
    """Return the header of a split as stored. Raises ConfigError."""
    store = open_store(address)
    name = f"{split}.json"
    try:
        sizes = store.sizes("")
        if name not in sizes:
            splits = sorted(other.removesuffix(".json") for other in sizes if other.endswith(".json"))
            has = f"it has {', '.join(splits)}" if splits else "copy there what `lockstep data prepare` writes"
            raise ConfigError(f"{address} has no split {split}; {has}")
        data = bytearray(min(sizes[name], MAX_JSON_BYTES))
        store.read(name, 0, memoryview(data))
    except OSError as error:
        raise ConfigError(f"{error.filename or address}: {error.strerror or error}") from error
    return bytes(data)


def downloaded_split(address: str, split: str, header: bytes, fingerprint: str) -> Path:
    """Return the local folder with a split, downloaded if need be.

    Args:
        header: As stored.
        fingerprint: Hash of tokens and documents that the header states.

    Raises:
        ConfigError: The store or the disk fails, or the files aren't those that the header describes.
    """
    folder = cache_folder("tokens")
    key = hashlib.blake2b(split.encode() + b"\n" + header, digest_size=16).hexdigest()
    entry = folder / key
    try:
        if not entry.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder / f"{key}.lock", f"downloading {address}/{split}") as show:
                if not entry.is_dir():  # another process may have downloaded it meanwhile
                    _download(open_store(address), split, header, fingerprint, entry, show)
    except OSError as error:
        remedy = f"; {cache_remedy(error)}" if error.errno in DISK_FULL else ""
        raise ConfigError(f"{error.filename or address}: {error.strerror or error}{remedy}") from error
    return entry


def _download(
    store: BlobStore, split: str, header: bytes, fingerprint: str, entry: Path, show: Callable[[str], None]
) -> None:
    remove_abandoned(entry)
    draft = draft_of(entry)
    draft.mkdir()
    try:
        hasher = hashlib.blake2b(digest_size=16)
        for part in ("tokens", "documents"):
            name = f"{split}.{part}"
            with naming(draft / name):
                _download_file(store, name, draft / name, show)
            with (draft / name).open("rb") as file:
                while block := file.read(_HASHED_BYTES):
                    hasher.update(block)
        if hasher.hexdigest() != fingerprint:
            raise ConfigError(
                f"the files of split {split} in {store.place} are not those that {split}.json describes; copy there "
                "again what `lockstep data prepare` has written"
            )
        (draft / f"{split}.json").write_bytes(header)
        try:
            draft.rename(entry)
        except OSError:
            if not entry.is_dir():  # on a file system without locks, another process may be first
                raise
        flush(entry.parent)
    finally:
        remove(draft)


def _download_file(store: BlobStore, name: str, path: Path, show: Callable[[str], None]) -> None:
    size = store.size(name)
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        os.ftruncate(handle, size)

        def copy(offset: int) -> None:
            data = memoryview(bytearray(min(_RANGE_BYTES, size - offset)))
            store.read(name, offset, data)
            written = 0
            while written < len(data):
                written += os.pwrite(handle, data[written:], offset + written)

        with ThreadPoolExecutor(_THREADS, thread_name_prefix="download") as pool:
            for number, _ in enumerate(pool.map(copy, range(0, size, _RANGE_BYTES)), 1):
                show(f"{size_text(min(number * _RANGE_BYTES, size))} of {size_text(size)}")
        os.fsync(handle)
    finally:
        os.close(handle)
