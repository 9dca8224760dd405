"""Token ids in a memory-mapped file: tokenized once, read by any number of runs and ranks.

FOLDER/train.json         header, written last: the split exists if it exists
      /train.tokens       ids of all documents, one after the other, uint16 or uint32
      /train.documents    offset of each document, and the end of the last one, int64

joined    samples are windows of the stream
whole     samples are packed documents (packing.py); no target is in another document than its input
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.config.schema import Tokens
from lockstep.core.errors import ConfigError
from lockstep.core.files import MAX_JSON_BYTES, read_bounded, write_atomically
from lockstep.core.protocols import Source
from lockstep.core.records import Batch, DataFacts
from lockstep.data import windows
from lockstep.data.order import Indices
from lockstep.data.packing import pack
from lockstep.data.token_downloads import downloaded_header, downloaded_split
from lockstep.stores.addresses import is_address

FORMAT = 1
_PREPARE = "write it with `lockstep data prepare`"
_IGNORED = -100


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a split.

    Attributes:
        dtype: uint16 or uint32.
        vocabulary: Number of token ids.
        tokenizer: Folder or hub name, or `bytes`.
        end: Token id at the end of each document.
        bytes_per_token: Mean length of a token's text, end tokens included.
        fingerprint: BLAKE2b hash of tokens and documents.
    """

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
    length = section.length
    if is_address(section.folder):
        stored = downloaded_header(section.folder, section.split)
        header = _parsed_header(stored, f"{section.folder}/{section.split}.json")
        folder = downloaded_split(section.folder, section.split, stored, header.fingerprint)
    else:
        folder = Path(section.folder).expanduser()
        header = read_header(folder, section.split)
    tokens = _mapped(folder / f"{section.split}.tokens", header.dtype, header.tokens)
    if section.documents == "joined":
        return windows.WindowSource(
            windows.cut_windows(tokens, length, "the token file"),
            windows.fingerprint("joined", header.fingerprint, length),
            aligned=aligned,
            vocabulary=header.vocabulary,
            bytes_per_token=header.bytes_per_token,
        )
    documents = _mapped(folder / f"{section.split}.documents", "int64", header.documents + 1)
    return WholeDocuments(tokens, np.array(documents), header, length, aligned=aligned)


def tokenizer_name(folder: str, split: str) -> str:
    """Return the tokenizer of a split in a folder or at an address: folder or hub name, or `bytes`."""
    if is_address(folder):
        return _parsed_header(downloaded_header(folder, split), f"{folder}/{split}.json").tokenizer
    return read_header(Path(folder).expanduser(), split).tokenizer


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
        self.fingerprint = windows.fingerprint("whole", header.fingerprint, length)

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
        targets = np.full(has_text.shape, _IGNORED, dtype=np.int64)
        targets[has_text] = self._targets(text, ends - lengths, ends)
        name = "input_ids" if self._aligned else "tokens"
        return Batch({name: torch.from_numpy(inputs)}, torch.from_numpy(targets), len(indices), int(ends[-1]))

    def _targets(self, text: windows.Tokens, starts: NDArray[np.int64], ends: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return each token itself or, if not aligned, the next in its piece, [tokens]."""
        targets: NDArray[np.int64] = text.astype(np.int64)
        if self._aligned:
            targets[starts] = _IGNORED  # after the shift, the target of the previous piece's last token
            return targets
        targets[:-1] = targets[1:]
        targets[ends - 1] = _IGNORED
        return targets


def _ranges(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return starts[0] .. starts[0] + lengths[0], then starts[1] .. and so on."""
    ends = np.cumsum(lengths)
    positions: NDArray[np.int64] = np.arange(ends[-1]) + np.repeat(starts - (ends - lengths), lengths)
    return positions


# --- files ------------------------------------------------------------------------------------------------------


def read_header(folder: Path, split: str) -> Header:
    """Return a split's header.

    Raises:
        ConfigError: There is none, or its format isn't supported.
    """
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder.absolute()}; {_PREPARE}")
    path = folder / f"{split}.json"
    if not path.is_file():
        splits = sorted(file.stem for file in folder.glob("*.json") if file.with_suffix(".tokens").is_file())
        raise ConfigError(f"{folder} has no split {split}; " + (f"it has {', '.join(splits)}" if splits else _PREPARE))
    try:
        data = read_bounded(path, MAX_JSON_BYTES)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not the header of a token file ({error!r}); {_PREPARE}") from error
    return _parsed_header(data, path)


def _parsed_header(data: bytes | str, path: Path | str) -> Header:
    try:
        values = json.loads(data)
        header = Header(**{field.name: values[field.name] for field in fields(Header)})
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} is not the header of a token file ({error!r}); {_PREPARE}") from error
    if header.format != FORMAT:
        raise ConfigError(f"{path} has format {header.format}, but this version reads {FORMAT}; {_PREPARE} again")
    return header


def write_header(folder: Path, split: str, header: Header) -> None:
    """Write a split's header atomically."""
    write_atomically(folder / f"{split}.json", json.dumps(asdict(header), indent=2) + "\n")


def _mapped(path: Path, dtype: str, items: int) -> NDArray[np.generic]:
    expected = items * np.dtype(dtype).itemsize
    size = path.stat().st_size if path.is_file() else 0
    if size != expected:
        raise ConfigError(f"{path} has {size} bytes, but its header states {expected}; {_PREPARE} again")
    return np.memmap(path, dtype=dtype, mode="r", shape=(items,)).view(np.ndarray)
