"""Reads environment variables and the command line, each as one more layer over the files.

LOCKSTEP_OPTIM__LR=3e-4        optim.lr
--optim.lr 3e-4                optim.lr
--optim.lr=3e-4                optim.lr
optim.lr=3e-4                  optim.lr
--model.compile                model.compile: true
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from lockstep.config import shape
from lockstep.config.override import Override
from lockstep.config.reading import Leaf, Node, Table, TableEntry, read_value
from lockstep.core.errors import Problem
from lockstep.strategies.registry import names

PREFIX = "LOCKSTEP_"


def from_flags(overrides: Sequence[str | Override], beneath: Table) -> tuple[Table, list[Problem]]:
    """Return one layer of all overrides, of which later ones win; `beneath` has the selected kinds."""
    entries = [Override.parse(item) if isinstance(item, str) else item for item in overrides]
    return _layer([(item, tuple(item.key.split("."))) for item in entries], beneath)


def from_environment(environ: Mapping[str, str], beneath: Table) -> tuple[Table, list[Problem]]:
    """Return one layer of all variables `LOCKSTEP_SECTION__KEY`; those without `__` are not part of the config."""
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
        for near in difflib.get_close_matches(rest, flat, n=1, cutoff=0.9):  # LOCKSTEP_OPTIM_LR
            meant = PREFIX + "__".join(flat[near]).upper()
            why = f"has no effect; two underscores separate the keys: write {meant}"
            problems.append(Problem(variable, "", why))
    tree, further = _layer(layer, beneath)
    return tree, problems + further


@cache
def _flat_keys(strategies: tuple[str, ...]) -> Mapping[str, tuple[str, ...]]:
    """Return the paths of all keys, by what their variables would be with one underscore."""
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
    """Return the key of a variable, which is upper case.

    Free names keep their spelling, unless the files spell them otherwise (`HELD_OUT` is then `held-out`).
    """
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
