"""Merges several layers to one tree: later ones win, key by key.

    recipe.yaml   optim: {lr: 1e-3, name: sgd}  ┐
    more.yaml     optim: {lr: 3e-4}             ├──>  optim: {lr: 1e-2, name: sgd}
    command line  optim.lr=1e-2                 ┘

Mappings are merged; lists and single values are replaced. Where `kind` says which keys there are (`model`,
`data.train`), a later `kind` takes over the keys that both kinds have and leaves the others out, with a note. So does
a later key of several that exclude each other: `run.epochs` replaces an earlier `run.steps`.
"""

from __future__ import annotations

from lockstep.config import shape
from lockstep.config.reading import Leaf, Node, Table, TableEntry
from lockstep.config.shape import ANYTHING, ValueShape

ALTERNATIVES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("run",): ("steps", "samples", "tokens", "epochs"),
    ("schedule",): ("warmup_steps", "warmup_ratio"),
}
"""Keys by section of which only one can be set, since they set the same thing in several ways."""


def merge(older: Table, newer: Table) -> tuple[Table, list[str]]:
    """Return the merged tree, and a note for every key that a change of kind left out."""
    notes: list[str] = []
    return _tables(older, newer, shape.root(), (), notes), notes


def _tables(older: Table, newer: Table, at: ValueShape, path: tuple[str, ...], notes: list[str]) -> Table:
    older = _change_kind(older, newer, at, path, notes)
    older = _change_alternative(older, newer, path, notes)
    entries = dict(older.entries)
    for key, entry in newer.entries.items():
        before = entries.get(key)
        inner = inside(at, key, newer.get("kind") or older.get("kind"))
        node = _nodes(before.node, entry.node, inner, (*path, key), notes) if before else entry.node
        kept = before is not None and isinstance(node, Table)  # a mapping stands where it was first written
        entries[key] = TableEntry(node, before.where if before and kept else entry.where)
    return Table(entries, older.where or newer.where)


def _nodes(older: Node, newer: Node, at: ValueShape, path: tuple[str, ...], notes: list[str]) -> Node:
    if isinstance(older, Table) and isinstance(newer, Table):
        return _tables(older, newer, at, path, notes)
    empty = isinstance(newer, Leaf) and newer.value is None
    if isinstance(older, Table) and empty and at.sections():
        return older  # `optim:` with nothing under it sets nothing
    return newer


def _change_kind(older: Table, newer: Table, at: ValueShape, path: tuple[str, ...], notes: list[str]) -> Table:
    """Return the older layer without the keys that the newer layer's kind doesn't have."""
    before, after = older.get("kind"), newer.get("kind")
    if not at.kinds or not isinstance(before, Leaf) or not isinstance(after, Leaf) or before.value == after.value:
        return older
    section = at.select(after.value)
    if section is None:
        return older  # a wrong kind is reported as such
    known = shape.fields(section)
    lost = [key for key in older.entries if key not in known]
    if lost:
        name = ".".join(path)
        gone = ", ".join(f"{name}.{key}" for key in lost)
        by = f" ({after.where})" if after.where else ""
        notes.append(f"{name}.kind is now {after.value}{by}; left out, as only {before.value} has them: {gone}")
    return Table({key: entry for key, entry in older.entries.items() if key in known}, older.where)


def _change_alternative(older: Table, newer: Table, path: tuple[str, ...], notes: list[str]) -> Table:
    """Return the older layer without what the newer one sets by another key."""
    ways = ALTERNATIVES.get(path, ())
    given = [way for way in ways if _has_value(newer, way)]
    lost = [way for way in ways if given and way not in newer.entries and _has_value(older, way)]
    for way in lost:
        entry = newer.entries[given[0]]
        notes.append(f"{path[0]}.{given[0]} ({entry.node.where}) takes the place of {path[0]}.{way}")
    return Table({key: entry for key, entry in older.entries.items() if key not in lost}, older.where)


def _has_value(table: Table, key: str) -> bool:
    node = table.get(key)
    return node is not None and not (isinstance(node, Leaf) and node.value is None)


def inside(at: ValueShape, key: str, kind: Node | None = None) -> ValueShape:
    """Return the shape one key further in; `kind` chooses among sections."""
    section = at.select(kind.value if isinstance(kind, Leaf) else None)
    if section is not None:
        return shape.fields(section).get(key, ANYTHING)
    return at.values or ANYTHING
