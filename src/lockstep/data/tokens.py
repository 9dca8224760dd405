"""Token ids in a memory-mapped file: tokenized once, read by any number of runs and ranks.

FOLDER/train.json         header, written last: the split exists if it exists
      /train.tokens       ids of all documents, one after the other, uint16 or uint32
      /train.documents    offset of each document, and the end of the last one, int64

joined    samples are windows of the stream
whole     samples are packed documents (`pack`); no target is in another document than its input

Each host downloads a split in an object store once, verified, to ~/.cache/lockstep/tokens/(hash of its header). Other
processes wait for the lock, not in a collective.
"""

from __future__ import annotations

import hashlib
import json
import os
from bisect import bisect_left, insort
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.config.schema import Tokens
from lockstep.core.cache_files import cache_folder, cache_remedy, locked, whole_folder
from lockstep.core.errors import ConfigError
from lockstep.core.files import MAX_JSON_BYTES, naming, read_bounded, write_atomically
from lockstep.core.formatting import size as size_text
from lockstep.core.protocols import Source
from lockstep.core.records import IGNORED, Batch, DataFacts
from lockstep.data import windows
from lockstep.data.order import Indices, fingerprint
from lockstep.stores.addresses import is_address
from lockstep.stores.blobs import BlobStore, read_whole
from lockstep.stores.buckets import open_store

Integers = NDArray[np.int64]
FORMAT = 1
_PREPARE = "write it with `lockstep data prepare`"
_RETRY_SECONDS = 60.0
_RANGE_BYTES = 2**24
_THREADS = 4
_HASHED_BYTES = 2**22


@dataclass(frozen=True, slots=True)
class Packing:
    """The pieces of the stream in each sample, which holds up to `capacity` tokens.

    Pieces [pieces] begin at `starts`, ordered by sample; sample s holds pieces bounds[s] .. bounds[s + 1].
    """

    starts: Integers
    lengths: Integers
    bounds: Integers
    capacity: int

    @property
    def samples(self) -> int:
        return len(self.bounds) - 1

    @property
    def padding(self) -> float:
        """The fraction of all positions that stay empty."""
        return 1 - int(self.lengths.sum()) / max(1, self.samples * self.capacity)


def pack(offsets: Integers, capacity: int) -> Packing:
    """Pack the documents between the `offsets` [documents + 1] of a stream."""
    starts, lengths = _cut(offsets, capacity)
    keys = (capacity - lengths).astype(np.min_scalar_type(capacity))  # few bits: a radix sort
    longest_first = np.argsort(keys, kind="stable")
    samples = _place(np.bincount(lengths, minlength=capacity + 1), capacity)
    pieces = longest_first[np.argsort(samples, kind="stable")]
    bounds = np.concatenate([[0], np.cumsum(np.bincount(samples))]) if len(samples) else np.zeros(1, np.int64)
    return Packing(starts[pieces], lengths[pieces], bounds, capacity)


def _cut(offsets: Integers, capacity: int) -> tuple[Integers, Integers]:
    """Return start and length of each piece: a document, or a part of a document that is longer than a sample."""
    lengths = np.diff(offsets)
    pieces = -(-lengths // capacity)
    documents = np.repeat(np.arange(len(lengths)), pieces)
    number = np.arange(len(documents)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    starts = offsets[documents] + number * capacity
    return starts, np.minimum(capacity, offsets[documents + 1] - starts)


def _place(counts: Integers, capacity: int) -> Integers:
    """Return the sample of each piece, longest first, given the number of pieces of each length."""
    placed: list[Integers] = []
    opened = 0
    not_full: dict[int, list[Integers]] = {}  # samples by the space left in them
    spaces: list[int] = []  # the keys, sorted

    def put(samples: Integers, space: int) -> None:
        if len(samples) and space:
            if space not in not_full:
                not_full[space] = []
                insort(spaces, space)
            not_full[space].append(samples)

    for length in range(capacity, 0, -1):
        left = int(counts[length])
        while left:
            fit = bisect_left(spaces, length)  # the fullest with space, or else new ones
            if fit < len(spaces):
                space = spaces.pop(fit)
                samples = np.concatenate(not_full.pop(space))
            else:
                space, first = capacity, opened
                opened += -(-left // (capacity // length))
                samples = np.arange(first, opened)
            each = space // length
            num_full = min(len(samples), left // each)
            full, rest = samples[:num_full], samples[num_full:]
            placed.append(np.repeat(full, each) if each > 1 else full)
            put(full, space - each * length)
            left -= num_full * each
            extra = min(left, each) if len(rest) else 0  # for the last sample, which they don't fill
            if extra:
                placed.append(np.repeat(rest[:1], extra))
                put(rest[:1], space - extra * length)
                rest = rest[1:]
                left -= extra
            put(rest, space)
    return np.concatenate(placed) if placed else np.zeros(0, np.int64)


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a split; `tokenizer` is a folder or hub name, or `bytes`; `fingerprint` hashes the files."""

    format: int
    dtype: str
    tokens: int
    documents: int
    vocabulary: int
    tokenizer: str
    end: int
    bytes_per_token: float
    fingerprint: str


def open_tokens(section: Tokens, *, aligned: bool) -> Source:
    """Return the source of a split; `aligned` as for `windows.WindowSource`."""
    length, folder = section.length, Path(section.folder).expanduser()
    header, stored = read_header(section.folder, section.split)
    if is_address(section.folder):
        key = hashlib.blake2b(section.split.encode() + b"\n" + stored, digest_size=16).hexdigest()
        download = partial(_download, section.folder, section.split, header.fingerprint, stored)
        folder = cached_folder("tokens", key, f"downloading {section.folder}/{section.split}", download)
    tokens = _mapped(folder / f"{section.split}.tokens", header.dtype, header.tokens)
    if section.documents == "joined":
        return windows.WindowSource(
            windows.cut_windows(tokens, length, "the token file"),
            fingerprint("joined", header.fingerprint, length),
            aligned=aligned,
            vocabulary=header.vocabulary,
            bytes_per_token=header.bytes_per_token,
        )
    documents = _mapped(folder / f"{section.split}.documents", "int64", header.documents + 1)
    return WholeDocuments(tokens, np.array(documents), header, length, aligned=aligned)


def tokenizer_name(folder: str, split: str) -> str:
    """Return the tokenizer of a split in a folder or at an address: folder or hub name, or `bytes`."""
    return read_header(folder, split)[0].tokenizer


def read_header(folder: str, split: str) -> tuple[Header, bytes]:
    """Return the header of a split in a folder or at an address, and its bytes. Raises ConfigError."""
    name, path = f"{split}.json", Path(folder).expanduser()
    store = open_store(folder) if is_address(folder) else None
    if store is None and not path.is_dir():
        raise ConfigError(f"there is no folder {path.absolute()}; {_PREPARE}")
    try:
        names = list(store.sizes("")) if store is not None else [file.name for file in path.iterdir()]
        if name not in names or f"{split}.tokens" not in names:
            splits = sorted(other.removesuffix(".tokens") for other in names if other.endswith(".tokens"))
            there = f"it has {', '.join(splits)}" if splits else _PREPARE
            raise ConfigError(f"{folder} has no split {split}; {there}")
        data = read_bounded(path / name, MAX_JSON_BYTES) if store is None else read_whole(store, name, MAX_JSON_BYTES)
        values = json.loads(data)
        header = Header(**{field.name: values[field.name] for field in fields(Header)})
    except OSError as error:
        raise ConfigError(f"{error.filename or folder}: {error.strerror or error}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{folder}/{name} is not the header of a token file ({error!r}); {_PREPARE}") from error
    if header.format != FORMAT:
        raise ConfigError(f"{folder}/{name} has format {header.format}, not {FORMAT}; {_PREPARE} again")
    return header, data


class WholeDocuments:
    """Packed documents. Empty positions hold the end token and have no target."""

    draws = False

    def __init__(
        self, tokens: windows.Tokens, documents: NDArray[np.int64], header: Header, length: int, *, aligned: bool
    ) -> None:
        self._tokens = tokens
        self._end = header.end
        self._length = length
        self._aligned = aligned
        self._packing = pack(documents, length)
        self.facts = DataFacts(
            self._packing.samples, None, vocabulary=header.vocabulary, bytes_per_token=header.bytes_per_token
        )
        self.fingerprint = fingerprint("whole", header.fingerprint, length)

    def fetch(self, indices: Indices) -> Batch:
        packing = self._packing
        first, stop = packing.bounds[indices], packing.bounds[indices + 1]
        pieces = _ranges(first, stop - first)
        lengths = packing.lengths[pieces]
        ends = np.cumsum(lengths)
        text = self._tokens[_ranges(packing.starts[pieces], lengths)]
        filled = np.add.reduceat(lengths, np.cumsum(stop - first) - (stop - first))
        has_text = np.arange(self._length) < filled[:, None]
        inputs = np.full(has_text.shape, self._end, dtype=np.int64)
        inputs[has_text] = text
        targets = np.full(has_text.shape, IGNORED, dtype=np.int64)
        targets[has_text] = self._targets(text, ends - lengths, ends)
        name = "input_ids" if self._aligned else "tokens"
        return Batch({name: torch.from_numpy(inputs)}, torch.from_numpy(targets), len(indices), int(ends[-1]))

    def _targets(self, text: windows.Tokens, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
        targets: NDArray[np.int64] = text.astype(np.int64)
        if self._aligned:
            targets[starts] = IGNORED  # after the shift, the target of the previous piece's last token
            return targets
        targets[:-1] = targets[1:]
        targets[ends - 1] = IGNORED
        return targets


def _ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    ends = np.cumsum(lengths)
    positions: NDArray[np.int64] = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
    return positions


# --- files ------------------------------------------------------------------------------------------------------


def write_header(folder: Path, split: str, header: Header) -> None:
    """Write a split's header atomically."""
    write_atomically(folder / f"{split}.json", json.dumps(asdict(header), indent=2) + "\n")


def _mapped(path: Path, dtype: str, items: int) -> NDArray[np.generic]:
    expected = items * np.dtype(dtype).itemsize
    size = path.stat().st_size if path.is_file() else 0
    if size != expected:
        raise ConfigError(f"{path} has {size} bytes, but its header says {expected}; {_PREPARE} again")
    return np.memmap(path, dtype=dtype, mode="r", shape=(items,)).view(np.ndarray)


def cached_folder(kind: str, key: str, work: str, make: Callable[[Path, Callable[[str], None]], None]) -> Path:
    """Return the folder of this key in the cache, which the first process to need it makes, whole or not at all.

    `work` is for messages; `make` fills the folder, and shows how far that is. Raises ConfigError.
    """
    folder = cache_folder(kind)
    entry = folder / key
    try:
        if not entry.is_dir():
            folder.mkdir(parents=True, exist_ok=True)
            with locked(folder / f"{key}.lock", work) as show:
                if not entry.is_dir():  # another process may have made it meanwhile
                    with whole_folder(entry) as draft:
                        make(draft, show)
    except OSError as error:
        remedy = "" if is_address(str(error.filename)) else f"; {cache_remedy(error)}"
        raise ConfigError(f"{work}: {error.filename or entry}: {error.strerror or error}{remedy}") from error
    return entry


def _download(
    address: str, split: str, fingerprint: str, header: bytes, draft: Path, show: Callable[[str], None]
) -> None:
    store, hasher = open_store(address, _RETRY_SECONDS), hashlib.blake2b(digest_size=16)
    for part in ("tokens", "documents"):
        name = f"{split}.{part}"
        with naming(draft / name):
            _download_file(store, name, draft / name, show)
        with (draft / name).open("rb") as file:
            while block := file.read(_HASHED_BYTES):
                hasher.update(block)
    if hasher.hexdigest() != fingerprint:
        raise ConfigError(f"the files of split {split} in {store.place} don't match {split}.json")
    (draft / f"{split}.json").write_bytes(header)


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
    finally:
        os.close(handle)
