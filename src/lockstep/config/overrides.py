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

from lockstep.config import shape
from lockstep.config.merging import inside
from lockstep.config.override import Override
from lockstep.config.reading import Leaf, Node, Table, TableEntry, read_value
from lockstep.core.errors import Problem

PREFIX = "LOCKSTEP_"


def from_flags(overrides: Sequence[str | Override], beneath: Table) -> tuple[Table, list[Problem]]:
    """Return one layer of all overrides; of two for one key the later wins. `beneath` has the chosen kinds."""
    entries = [Override.parse(item) if isinstance(item, str) else item for item in overrides]
    return _layer([(item, tuple(item.key.split("."))) for item in entries], beneath)


def from_environment(environ: Mapping[str, str], beneath: Table) -> tuple[Table, list[Problem]]:
    """Return one layer of all variables `LOCKSTEP_SECTION__KEY`. Those without `__` are not the config's."""
    layer: list[tuple[Override, tuple[str, ...]]] = []
    problems: list[Problem] = []
    for variable, text in sorted(environ.items()):
        if not variable.startswith(PREFIX):
            continue
        rest = variable.removeprefix(PREFIX)
        if "__" in rest:
            path = _spelled(rest.split("__"), beneath)
            layer.append((Override(".".join(path), text, variable), path))
        elif meant := _single_underscores(rest):
            problems.append(Problem(variable, "", f"would do nothing; two underscores part the keys: write {meant}"))
    tree, further = _layer(layer, beneath)
    return tree, problems + further


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
    if _needs_no_value(path, beneath):
        return Leaf(True, "true", override.place), []
    missing = Problem(override.place, "", f"has no value; write {override.place} VALUE")
    return Leaf(None, None, override.place), [missing]


def _needs_no_value(path: tuple[str, ...], beneath: Table) -> bool:
    """Return whether the key is a boolean, or unknown: then it is reported as unknown."""
    at, node = shape.root(), beneath
    for key in path:
        at = inside(at, key, node.get("kind"))
        below = node.get(key)
        node = below if isinstance(below, Table) else Table()
    return at.boolean or at.anything


def _put(tree: Table, path: tuple[str, ...], node: Node, where: str) -> Table:
    key, *rest = path
    if rest:
        before = tree.get(key)
        node = _put(before if isinstance(before, Table) else Table({}, where), tuple(rest), node, where)
    return Table({**tree.entries, key: TableEntry(node, where)}, tree.where or where)


def _spelled(words: Sequence[str], beneath: Table) -> tuple[str, ...]:
    """Return the key of a variable, which is upper case. Free names keep their spelling, unless the files spell them
    otherwise (`HELD_OUT` is then `held-out`)."""
    path: list[str] = []
    at, node = shape.root(), beneath
    for word in words:
        known = set(node.entries).union(*(shape.fields(section) for section in at.sections()))
        matches = [key for key in known if key.lower().replace("-", "_") == word.lower()]
        free = not at.sections()
        key = matches[0] if matches else (word if free else word.lower())
        path.append(key)
        at = inside(at, key, node.get("kind"))
        below = node.get(key)
        node = below if isinstance(below, Table) else Table()
    return tuple(path)


def _single_underscores(rest: str) -> str | None:
    """Return the variable that LOCKSTEP_OPTIM_LR stands for, if it looks like a key at all."""
    flat = {"_".join(path).upper(): path for path in shape.all_keys() if len(path) > 1 and "NAME" not in path}
    near = difflib.get_close_matches(rest, flat, n=1, cutoff=0.9)
    return PREFIX + "__".join(flat[near[0]]).upper() if near else None
