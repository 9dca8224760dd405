"""The keys of other tools and what they mean here: the rows of `keys.md`.

    tool      whose key it is; `any` where several have it, or scripts do
    keys      a key, or `section.key`, which goes first; {a,b} stands for either
    rule      how its value becomes ours: see `rules`
    ours      Lockstep's key; `*` stands for theirs
    values    of `choice`: theirs=ours, where theirs may end with `*`, and ours is `-` if it asks for nothing, `~` if it
              isn't needed, as `note` explains; of `not there` and `to do`: the values that ask for nothing, where they
              aren't the usual ones; of `interval`: the keys whose strategy decides
    unless    keys that decide instead, where they have a value
    note      why nothing comes of it, or what is left to do; <value> stands for theirs

Empty cells behind the keys repeat those of the row above.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path

from lockstep.config.reading import resolve


@dataclass(frozen=True, slots=True)
class KeyRow:
    """A row for one of its keys."""

    tool: str
    key: str
    rule: str
    ours: str
    values: tuple[tuple[str, str], ...]
    unless: tuple[str, ...]
    note: str

    def note_for(self, value: object) -> str:
        """Return the note about this value."""
        return self.note.replace("<value>", str(value))

    def quiet_values(self) -> list[object]:
        """Return the values that ask for nothing, if the row states them."""
        return ["" if value == "''" else [] if value == "[]" else resolve(value) for value, _ in self.values]


@cache
def key_rows() -> dict[str, KeyRow]:
    """Return the table by key, read when it is first needed."""
    rows = {}
    above: list[str] = []
    for line in Path(__file__).with_suffix(".md").read_text(encoding="utf-8").splitlines()[2:]:
        tool, keys, *rest = (cell.strip() for cell in line.strip("|").split("|"))
        above = rest if any(rest) else above
        rule, ours, values, unless, note = above
        pairs = tuple((theirs, mine) for theirs, _, mine in (pair.partition("=") for pair in values.split()))
        for key in _expanded(keys):
            assert key not in rows, key
            last = key.rpartition(".")[2]
            rows[key] = KeyRow(tool, key, rule, ours.replace("*", last), pairs, tuple(_expanded(unless)), note)
    return rows


def _expanded(keys: str) -> Iterator[str]:
    for key in keys.split():
        parts = (part.split(",") for part in re.split(r"[{}]", key))
        yield from map("".join, product(*parts))
