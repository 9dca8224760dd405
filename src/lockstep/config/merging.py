"""Merges several layers to one tree: later ones win, key by key.

    recipe.yaml   optim: {lr: 1e-3, name: sgd}  ┐
    more.yaml     optim: {lr: 3e-4}             ├──>  optim: {lr: 1e-2, name: sgd}
    command line  optim.lr=1e-2                 ┘

Mappings are merged; lists and single values are replaced. Where `kind` determines the keys (`model`, `data.train`), a
later `kind` keeps the keys that both kinds have and leaves the others out, with a note. The same holds for keys that
exclude each other: a later `run.epochs` replaces an earlier `run.steps`.
"""

from __future__ import annotations

from lockstep.config import shape
from lockstep.config.reading import Leaf, Table, TableEntry
from lockstep.config.shape import ValueShape

ALTERNATIVES: dict[tuple[str, ...], tuple[str, ...]] = {
    ("run",): ("steps", "samples", "tokens", "epochs"),
    ("schedule",): ("warmup_steps", "warmup_ratio"),
}
"""Keys by section that exclude each other, since they set the same thing."""


def merge(older: Table, newer: Table) -> tuple[Table, list[str]]:
    """Return the merged tree, and a note for every key that a change of kind left out."""
    notes: list[str] = []
    return _tables(older, newer, shape.root(), (), notes), notes


def _tables(older: Table, newer: Table, at: ValueShape, path: tuple[str, ...], notes: list[str]) -> Table:
    older = _change_kind(older, newer, at, path, notes)
    older = _change_alternative(older, newer, path, notes)
    entries = dict(older.entries)
    for key, entry in newer.entries.items():
        before, node = entries.get(key), entry.node
        inner = at.inside(key, newer if newer.get("kind") else older)
        if before is not None and isinstance(before.node, Table):
            if isinstance(node, Table):
                node = _tables(before.node, node, inner, (*path, key), notes)
            elif isinstance(node, Leaf) and node.value is None and inner.sections() and not inner.nullable:
                node = before.node  # `optim:` with nothing under it sets nothing; null leaves out `early_stopping`
        kept = before is not None and isinstance(node, Table)  # a mapping stays where it was first written
        entries[key] = TableEntry(node, before.where if before and kept else entry.where)
    return Table(entries, older.where or newer.where)


def _change_kind(older: Table, newer: Table, at: ValueShape, path: tuple[str, ...], notes: list[str]) -> Table:
    """Return the older layer without the keys that its kind has and the newer layer's doesn't; misspelled ones stay."""
    before, after = older.get("kind"), newer.get("kind")
    if not at.kinds or not isinstance(before, Leaf) or not isinstance(after, Leaf) or before.value == after.value:
        return older
    section, replaced = at.select(newer), at.select(older)
    if section is None or replaced is None:
        return older  # validation reports the wrong kind
    known, of_replaced = shape.fields(section), shape.fields(replaced)
    if lost := [key for key in older.entries if key in of_replaced and key not in known]:
        name = ".".join(path)
        keys = ", ".join(f"{name}.{key}" for key in lost)
        by = f" ({after.where})" if after.where else ""
        notes.append(f"{name}.kind is now {after.value}{by}; left out, as only {before.value} has them: {keys}")
    return Table({key: entry for key, entry in older.entries.items() if key not in lost}, older.where)


def _change_alternative(older: Table, newer: Table, path: tuple[str, ...], notes: list[str]) -> Table:
    """Return the older layer without what the newer one sets by another key."""
    ways = ALTERNATIVES.get(path, ())
    given = [way for way in ways if _has_value(newer, way)]
    lost = [way for way in ways if given and way not in newer.entries and _has_value(older, way)]
    for way in lost:
        entry = newer.entries[given[0]]
        notes.append(f"{path[0]}.{given[0]} ({entry.node.where}) replaces {path[0]}.{way}")
    return Table({key: entry for key, entry in older.entries.items() if key not in lost}, older.where)


def _has_value(table: Table, key: str) -> bool:
    node = table.get(key)
    return node is not None and not (isinstance(node, Leaf) and node.value is None)
