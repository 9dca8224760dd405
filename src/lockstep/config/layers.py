"""The layers of a config over its files: environment variables and the command line; later ones win, key by key.

    recipe.yaml                optim: {lr: 1e-3, name: sgd}  ┐
    more.yaml                  optim: {lr: 3e-4}             ├──>  optim: {lr: 1e-2, name: sgd}
    LOCKSTEP_OPTIM__LR=3e-3                                  │
    --optim.lr 1e-2, --optim.lr=1e-2, optim.lr=1e-2          ┘     --model.compile    true

Mappings are merged; lists and single values are replaced. A later `kind` leaves out the keys that it doesn't have, and
a later `run.epochs` replaces an earlier `run.steps`, with a note.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from functools import cache

from lockstep.config import shape
from lockstep.config.override import Override
from lockstep.config.reading import Leaf, Node, Table, TableEntry, read_value
from lockstep.config.shape import ValueShape
from lockstep.core.errors import Problem
from lockstep.strategies.registry import names

PREFIX = "LOCKSTEP_"


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
    """Return the older layer without keys that the newer layer's kind doesn't have; misspelled ones stay."""
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


def from_flags(overrides: Sequence[str | Override], beneath: Table) -> tuple[Table, list[Problem]]:
    """Return one layer of all overrides; `beneath` has the selected kinds."""
    entries = [Override.parse(item) if isinstance(item, str) else item for item in overrides]
    return _layer([(item, tuple(item.key.split("."))) for item in entries], beneath)


def from_environment(environ: Mapping[str, str], beneath: Table) -> tuple[Table, list[Problem]]:
    """Return one layer of all variables `LOCKSTEP_SECTION__KEY`; others are not part of the config."""
    layer: list[tuple[Override, tuple[str, ...]]] = []
    problems: list[Problem] = []
    for variable, text in sorted(environ.items()):
        if not variable.startswith(PREFIX):
            continue
        rest = variable.removeprefix(PREFIX)
        if "__" in rest:
            path = _spelled(rest.split("__"), beneath)
            layer.append((Override(".".join(path), text, variable), path))
            continue
        flat = _flat_keys(names())
        for near in get_close_matches(rest, flat, n=1, cutoff=0.9):  # LOCKSTEP_OPTIM_LR
            meant = PREFIX + "__".join(flat[near]).upper()
            why = f"has no effect; two underscores separate the keys: write {meant}"
            problems.append(Problem(variable, "", why))
    tree, further = _layer(layer, beneath)
    return tree, problems + further


@cache
def _flat_keys(strategies: tuple[str, ...]) -> Mapping[str, tuple[str, ...]]:
    return {"_".join(path).upper(): path for path in shape.all_keys() if len(path) > 1 and "NAME" not in path}


def _layer(overrides: Iterable[tuple[Override, tuple[str, ...]]], beneath: Table) -> tuple[Table, list[Problem]]:
    tree = Table()
    problems: list[Problem] = []
    for override, path in overrides:
        if not all(path):
            problems.append(Problem(override.place, "", "a key is made of names with single dots between them"))
            continue
        node, wrong = _value(override, path, beneath)
        problems += wrong
        tree = _put(tree, path, node, override.place)
    return tree, problems


def _value(override: Override, path: tuple[str, ...], beneath: Table) -> tuple[Node, list[Problem]]:
    if override.text is not None:
        return read_value(override.text, override.place)
    at, below = shape.root(), beneath
    for key in path:
        at, below = at.inside(key, below), _below(below, key)
    if at.boolean or at.anything:  # an unknown key is reported as unknown
        return Leaf(True, "true", override.place), []
    missing = Problem(override.place, "", f"has no value; write {override.place}=VALUE")
    return Leaf(None, None, override.place), [missing]


def _put(tree: Table, path: tuple[str, ...], node: Node, where: str) -> Table:
    key, *rest = path
    if rest:
        before = tree.get(key)
        node = _put(before if isinstance(before, Table) else Table({}, where), tuple(rest), node, where)
    return Table({**tree.entries, key: TableEntry(node, where)}, tree.where or where)


def _spelled(words: Sequence[str], beneath: Table) -> tuple[str, ...]:
    """Return the key of an upper-case variable; free names are spelled as in the files."""
    path: list[str] = []
    at, below = shape.root(), beneath
    for word in words:
        known = set(below.entries).union(*(shape.fields(section) for section in at.sections()))
        matches = [key for key in known if key.lower().replace("-", "_") == word.lower()]
        key = matches[0] if matches else (word.lower() if at.sections() else word)
        path.append(key)
        at, below = at.inside(key, below), _below(below, key)
    return tuple(path)


def _below(table: Table, key: str) -> Table:
    node = table.get(key)
    return node if isinstance(node, Table) else Table()
