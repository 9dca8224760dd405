"""The keys of other tools and their meaning in Lockstep: the rows of `keys.md`, and their answers.

    tool      the tool that has the key; `any` where several do
    keys      a key, or `section.key`, which takes precedence; {a,b} matches both words
    rule      how the value is converted: see `rules`
    target    Lockstep's key; `*` is replaced by the tool's
    values    of `choice`: TOOL'S=LOCKSTEP'S, where the first may end with `*`, and the second is `-` if the value
              requests nothing, `~` if it isn't needed; of `not there` and `to do`: values that request nothing, if
              they aren't the usual ones; of `interval`: keys with the strategy that decides
    unless    keys that decide instead, if they have a value
    note      why the key has no counterpart, or what is left to do; <value> is replaced by the tool's value

Empty cells after the keys repeat the row above.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from pathlib import Path
from typing import Literal, TypeAlias

from lockstep.config.reading import resolve
from lockstep.config.wording import OPEN

Status = Literal["taken", "derived", "not needed", "to do", "not there", "not known"]
Settings: TypeAlias = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class KeyRow:
    """A row for one of its keys."""

    tool: str
    key: str
    rule: str
    target: str
    values: tuple[tuple[str, str], ...]
    unless: tuple[str, ...]
    note: str

    def note_for(self, value: object) -> str:
        """Return the note about this value."""
        return self.note.replace("<value>", str(value))

    def quiet_values(self) -> list[object]:
        """Return the values that request nothing, if the row lists them."""
        return ["" if value == "''" else [] if value == "[]" else resolve(value) for value, _ in self.values]


@cache
def key_rows() -> dict[str, KeyRow]:
    """Return the table by key, read when it is first needed."""
    rows = {}
    above: list[str] = []
    for line in Path(__file__).with_suffix(".md").read_text(encoding="utf-8").splitlines()[2:]:
        tool, keys, *rest = (cell.strip() for cell in line.strip("|").split("|"))
        above = rest if any(rest) else above
        rule, target, values, unless, note = above
        pairs = tuple((source, target) for source, _, target in (pair.partition("=") for pair in values.split()))
        for key in _expanded(keys):
            assert key not in rows, key
            last = key.rpartition(".")[2]
            rows[key] = KeyRow(tool, key, rule, target.replace("*", last), pairs, tuple(_expanded(unless)), note)
    return rows


def keys_for(rule: str, target: str) -> list[str]:
    """Return the keys of a rule that set `target`, in the order of the table."""
    return [row.key for row in key_rows().values() if row.rule == rule and row.target == target]


def _expanded(keys: str) -> Iterator[str]:
    for key in keys.split():
        parts = (part.split(",") for part in re.split(r"[{}]", key))
        yield from map("".join, product(*parts))


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of importing a key: Lockstep's keys with their values, and why, or why there are none."""

    status: Status
    settings: Settings = field(default_factory=dict)
    why: str = ""


def taken(key: str, value: object, why: str = "") -> Answer:
    return Answer("taken", {key: value}, why)


def derived(why: str, settings: Settings) -> Answer:
    return Answer("derived", settings, why)


def not_needed(why: str) -> Answer:
    return Answer("not needed", {}, why)


def to_do(why: str) -> Answer:
    return Answer("to do", {}, why)


def asked(key: str, why: str) -> Answer:
    """Return a question: a run is refused until the key has a value."""
    return Answer("to do", {key: OPEN}, why)


def not_there(why: str) -> Answer:
    return Answer("not there", {}, why)


NOTHING = not_needed("it requests nothing")


class NeedsRanks(Exception):
    """A number can't be computed without the number of ranks."""
