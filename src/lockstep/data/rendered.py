"""Samples rendered as ids before training, once per machine or shared folder, so that their lengths are known.

rows --> render --> ids, and which of them are targets --> $LOCKSTEP_CACHE/KIND/KEY/ --> batches

padded    <user> Hi <end> <assistant> Hello <end> . . . . .         one sample in a row
packed    <user> Hi <end> <assistant> Hello <end> <user> And        several, with positions that restart
          0      1  2     3           4     5     0      1
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from lockstep.config.schema import HuggingFaceData
from lockstep.core.errors import ConfigError
from lockstep.core.records import IGNORED, Batch, DataFacts
from lockstep.data.order import Indices, fingerprint
from lockstep.data.tokens import Packing, cached_folder, pack

_AT_ONCE = 1000  # rows
_log = logging.getLogger("lockstep.data")


@dataclass(frozen=True, slots=True)
class Rendered:
    """A text's ids, and which of them are targets; `is_cut`: it was longer than `max_length`."""

    ids: NDArray[np.uint32]
    targets: NDArray[np.bool_]
    is_cut: bool = False


Render = Callable[[Indices], Iterator[list[Rendered] | None]]
"""Yields the texts of each sample, given the numbers of rows; None if one is too long. Raises ValueError."""


def open_rendered(
    kind: str,
    key: str,
    rows: int,
    render: Render,
    tokenizer: Any,
    section: HuggingFaceData,
    *,
    aligned: bool,
    classes: int | None = None,
    rated: Sequence[bool] | None = None,
) -> RenderedSource:
    """Return the source of samples that the first process to need them renders. Raises ConfigError.

    Args:
        kind: Folder in the cache.
        key: Hash of all that the samples depend on.
        rows: Their number.
        rated: Whether each row's answer is desirable; None: they aren't rated.
    """
    if section.packed and not aligned:
        raise ConfigError("only models of the transformers library keep samples in a row apart; remove packed")
    write = partial(_write, rows, section, render)
    folder = cached_folder(kind, key, f"rendering the {_noun(section)} of {section.name}", write)
    return RenderedSource(folder, tokenizer, section, aligned=aligned, classes=classes, rated=rated)


def _noun(section: HuggingFaceData) -> str:
    return "texts" if section.messages is None else "conversations"


def _write(rows: int, section: HuggingFaceData, render: Render, folder: Path, show: Callable[[str], None]) -> None:
    offsets, numbers, cut, left_out, untargeted = [0], [], 0, 0, 0
    digest = hashlib.blake2b(digest_size=16)
    with (folder / "ids").open("wb") as ids, (folder / "targets").open("wb") as targets:
        for number, rendered in _samples(rows, section, render, show):
            if rendered is None:
                left_out += 1
                continue
            if not all(each.targets[1:].any() for each in rendered):  # nothing predicts the first
                untargeted += 1
                continue
            cut += rendered[0].is_cut
            numbers.append(number)
            for each in rendered:
                offsets.append(offsets[-1] + len(each.ids))
                for file, values in ((ids, each.ids), (targets, each.targets)):
                    file.write(values.data)
                    digest.update(values.data)
    counts = {"rows": rows, "cut": cut, "left_out": left_out, "untargeted": untargeted}
    if not numbers:
        why = f"{left_out:,} are longer than max_length {section.max_length}, {untargeted:,} have no targets"
        raise ConfigError(f"none of the {rows:,} {_noun(section)} of {section.name} can be used: {why}")
    if changes := _changes(counts, section):
        _log.warning("%s: %s", section.name, changes)
    np.save(folder / "offsets.npy", np.array(offsets, np.int64))
    np.save(folder / "rows.npy", np.array(numbers, np.int64))
    digest.update(repr(offsets).encode())
    (folder / "facts.json").write_text(json.dumps({**counts, "fingerprint": digest.hexdigest()}))


def _samples(
    rows: int, section: HuggingFaceData, render: Render, show: Callable[[str], None]
) -> Iterator[tuple[int, list[Rendered] | None]]:
    """Yield the number of each row with its texts. Raises ConfigError."""
    for start in range(0, rows, _AT_ONCE):
        show(f"{start:,} of {rows:,} {_noun(section)}")
        indices = np.arange(start, min(start + _AT_ONCE, rows))
        rendered = render(indices)
        for number in indices.tolist():
            try:
                yield number, next(rendered)
            except ValueError as error:
                where = f"dataset {section.name}, split {section.split}, row {number + 1:,}"
                raise ConfigError(f"{where}: {error}") from error


class RenderedSource:
    """Rendered texts: `lengths` in tokens, and what is told about them: their `changes`, and how they are packed.

    A pair is one sample, with the chosen conversation in one row of a batch, and the rejected one in the next; and so
    is a rated one, with the answer of the dataset's row before to the same prompt in the next. Packed texts are put
    into samples, longest first, the same in each epoch (`tokens.pack`).

    If `aligned`, for models of the transformers library, targets have the places of their ids, and the objective shifts
    them. Otherwise they have those of the ids before.
    """

    draws = False

    def __init__(
        self,
        folder: Path,
        tokenizer: Any,
        section: HuggingFaceData,
        *,
        aligned: bool,
        classes: int | None = None,
        rated: Sequence[bool] | None = None,
    ) -> None:
        self._ids = np.memmap(folder / "ids", np.uint32, "r").view(np.ndarray)
        self._targets = np.memmap(folder / "targets", np.bool_, "r").view(np.ndarray)
        self._offsets = np.load(folder / "offsets.npy")
        self._rows: Indices = np.load(folder / "rows.npy")
        self.lengths = np.diff(self._offsets)
        facts = json.loads((folder / "facts.json").read_text())
        self.fingerprint: str = fingerprint("chats", facts.pop("fingerprint"))
        self._padding = tokenizer.pad_token_id
        self._aligned = aligned
        self._packing = pack(self._offsets, section.max_length) if section.packed else None
        self._desirable = None if rated is None else torch.tensor(rated)[torch.from_numpy(self._rows)]
        if rated is not None:
            self.fingerprint = fingerprint("rated", self.fingerprint, rated)
        samples, notes = len(self._rows), [_changes(facts, section)]
        if self._packing:
            self.fingerprint = fingerprint("packed", self.fingerprint, section.max_length)
            samples, filled = self._packing.samples, 1 - self._packing.padding
            notes.append(f"{len(self._rows):,} {_noun(section)} packed into {samples:,} samples, {filled:.1%} filled")
        self.changes = [note for note in notes if note]
        pairs, tokens = section.rejected is not None or rated is not None, int(self.lengths.sum())
        self._per_sample = 2 if pairs else 1
        self.facts = DataFacts(
            samples, None, len(tokenizer), classes, padding=self._padding, pairs=pairs, tokens=tokens
        )

    def fetch(self, indices: Indices) -> Batch:
        if self._packing:
            return self._packed(self._packing, indices)
        texts = (indices[:, None] * self._per_sample + np.arange(self._per_sample)).reshape(-1)
        places = [slice(self._offsets[text], self._offsets[text + 1]) for text in texts]
        joined = [(self._ids[place].astype(np.int64), self._targets[place].copy()) for place in places]
        desirable = None if self._desirable is None else self._desirable[torch.from_numpy(indices)]
        return padded_batch(joined, self._padding, len(indices), aligned=self._aligned, desirable=desirable)

    def rows_of(self, index: int) -> list[int]:
        """Return the numbers of the dataset's rows in a sample: one, or as many as are packed."""
        if self._packing is None:
            return [int(self._rows[index])]
        starts = self._packing.starts[self._packing.bounds[index] : self._packing.bounds[index + 1]]
        return [int(row) for row in self._rows[np.searchsorted(self._offsets, starts)]]

    def _packed(self, packing: Packing, indices: Indices) -> Batch:
        """Return samples of several texts: positions restart in each, by which attention keeps them apart.

        The first id of each has no target: it would be predicted from the text before. Padding is one more.
        """
        ids = np.full((len(indices), packing.capacity), self._padding, np.int64)
        targets, positions = np.full_like(ids, IGNORED), np.zeros_like(ids)
        tokens = 0
        for row, index in enumerate(indices):
            end = 0
            for piece in range(packing.bounds[index], packing.bounds[index + 1]):
                start, size = packing.starts[piece], packing.lengths[piece]
                begin, end = end, end + size
                ids[row, begin:end] = self._ids[start : start + size]
                positions[row, begin:end] = np.arange(size)
                marked = np.flatnonzero(self._targets[start + 1 : start + size]) + begin + 1
                targets[row, marked] = ids[row, marked]
            positions[row, end:] = np.arange(packing.capacity - end)
            tokens += int(end)
        inputs = {"input_ids": torch.from_numpy(ids), "position_ids": torch.from_numpy(positions)}
        return Batch(inputs, torch.from_numpy(targets), len(indices), tokens)


def _changes(counts: Mapping[str, int], section: HuggingFaceData) -> str:
    what = "cut" if section.messages is None else "first turns cut"
    kinds = {
        f"longer than max_length {section.max_length}: {what}": counts["cut"],
        f"longer than max_length {section.max_length}: left out": counts["left_out"],
        "without targets: left out": counts["untargeted"],
    }
    parts = [f"{number:,} {what}" for what, number in kinds.items() if number]
    return f"of {counts['rows']:,} {_noun(section)}, {'; '.join(parts)}" if parts else ""


def padded_batch(
    rows: list[tuple[Any, Any]], padding: int, samples: int, *, aligned: bool, desirable: torch.Tensor | None = None
) -> Batch:
    """Return rows of (ids, which are targets), padded on the right.

    Args:
        aligned: As for `RenderedSource`.
        desirable: Whether the answer of each sample is; None: they aren't rated.
    """
    width = max(len(ids) for ids, _ in rows)
    ids = torch.full((len(rows), width), padding)
    mask, targets = torch.zeros_like(ids), torch.full_like(ids, IGNORED)
    for row, (values, marked) in enumerate(rows):
        joined, size = torch.as_tensor(values), len(values)
        ids[row, :size], mask[row, :size] = joined, 1
        targets[row, :size] = torch.where(torch.as_tensor(marked), joined, IGNORED)
    moved = targets if aligned else following(targets)
    wanted = moved if desirable is None else {"answers": moved, "desirable": desirable}
    inputs = {"input_ids": ids, "attention_mask": mask} if aligned else {"tokens": ids}
    return Batch(inputs, wanted, samples, int(mask.sum()))


def following(targets: torch.Tensor) -> torch.Tensor:
    """Return the targets [samples, length] moved to the places of the ids before them."""
    moved = torch.full_like(targets, IGNORED)
    moved[:, :-1] = targets[:, 1:]
    return moved
