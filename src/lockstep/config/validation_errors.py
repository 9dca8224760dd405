"""Converts pydantic's errors to problems that a reader can act on.

loc ("model", "transformer", "layers")   ->   where run.yaml:3:11, key model.layers
type int_type, input "abc"               ->   'abc' is not a whole number above 0

optim.momentun                           ->   did you mean momentum?
lr                                       ->   write optim.lr
learnin_rate                             ->   did you mean learning_rate? Lockstep's key is optim.lr
precision.fp16                           ->   write `precision.compute: fp16`    (another tool's word)
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

import lockstep
from lockstep.config import shape
from lockstep.config.every import Unit
from lockstep.config.layers import PREFIX
from lockstep.config.reading import Items, Leaf, Node, Table, leaves
from lockstep.config.shape import ValueShape
from lockstep.config.wording import OPEN, expectation, nearest, shown
from lockstep.core.closest import closest_match
from lockstep.core.errors import Problem

Path = tuple[str, ...]
_MAX_KEYS = 100  # keys with a message: nearest matches take milliseconds a key


def problems(error: ValidationError, tree: Table) -> list[Problem]:
    """Return the problems of each key, in the order of the schema."""
    grouped: dict[Path, ErrorDetails] = {}  # one for each key, however many members of a union refused the value
    for details in error.errors(include_url=False, include_input=False):
        grouped.setdefault(_path(details["loc"], details["type"]), details)
    within = {path[:end] for path in grouped for end in range(len(path))}
    for path in within & grouped.keys():  # a mapping with a mistake inside, where a word is also valid
        if grouped[path]["type"] in ("literal_error", "string_type"):
            del grouped[path]
    return [problem for path in list(grouped)[:_MAX_KEYS] for problem in _about(path, grouped[path], tree)]


def _about(path: Path, details: ErrorDetails, tree: Table) -> list[Problem]:
    key = ".".join(path)
    node, at, where = _find(tree, path)
    match details["type"]:
        case "extra_forbidden":
            return _unknown(path, tree)
        case "missing" | "union_tag_not_found":
            valid = f"one of {', '.join(at.kinds)}" if at.kinds else f"it is {expectation(at)}"
            return [Problem(where, key, f"is missing; {valid}")]
        case "value_error":
            message = str(details["ctx"]["error"])
            inside = [] if node is None else [(deeper[-1], leaf.where) for deeper, leaf in leaves(node) if deeper]
            flags = [flag for name, flag in inside if name in message and flag.startswith(("--", PREFIX))]
            return [Problem(flags[-1] if flags else where, key, message)]
    return [Problem(where, key, details["msg"] if node is None else _refused(path, node, at, tree))]


def _unknown(path: Path, tree: Table) -> list[Problem]:
    node, _, _ = _find(tree, path)
    parent, at, _ = _find(tree, path[:-1])
    assert node is not None
    section = at.select(parent)
    sections = (section,) if section else at.sections()
    siblings = list(dict.fromkeys(key for section in sections for key in shape.fields(section)))
    inside = []
    if isinstance(node, Table) and _other_tools().key_hint(path, node, tree) is None:  # another tool's section
        written = [(deeper, leaf) for deeper, leaf in leaves(node) if deeper]
        for deeper, leaf in written:
            if hint := _other_tools().key_hint(path + deeper, leaf, tree):
                inside.append(Problem(_key_place(tree, path + deeper), ".".join(path + deeper), hint))
        if inside and len(inside) == len(written):
            return inside
    answer = "there is no such section" if inside else _suggested_key(path, siblings, node, tree)
    return [Problem(_key_place(tree, path), ".".join(path), answer), *inside]


# --- values -------------------------------------------------------------------------------------------------------


def _refused(path: Path, node: Node, at: ValueShape, tree: Table) -> str:
    if isinstance(node, Leaf) and node.value == OPEN:
        return f"is left to decide; write {expectation(at)}"
    if at.kinds and path[-1] == "kind" and isinstance(node, Leaf):
        near = closest_match(str(node.text or node.value), at.kinds)
        hint = f"did you mean {near}?" if near else f"one of {', '.join(at.kinds)}"
        return f"{shown(node)} is not a kind of {'.'.join(path[:-1])}; {hint}"
    if at.sections() and (answer := _other_tools().key_hint(path, node, tree)):
        return str(answer)
    answer = _other_tools().value_hint(".".join(path), node) or _hint(".".join(path), node, at)
    return f"{shown(node)} is not {expectation(at)}" + (f"; {answer}" if answer else "")


_DEVICES = {"gpu": "cuda", "rocm": "cuda"}


def _hint(key: str, node: Node, at: ValueShape) -> str | None:
    if not isinstance(node, Leaf):
        return None
    text = str(node.value if node.text is None else node.text)
    if at.choices and (near := _DEVICES.get(text) or closest_match(text, at.choices)):
        return f"did you mean {near}?"
    bounds = at.real or at.whole
    if bounds and (number := nearest(node.value, bounds, whole=at.real is None)):
        return f"the nearest is {number}"
    if at.items and at.items.text and node.value is not None:
        return f"write [{text}]"
    return f"its keys are {', '.join(shape.fields(at.section))}" if at.section else None


# --- locations ----------------------------------------------------------------------------------------------------


def _path(loc: Sequence[int | str], kind: str) -> Path:
    """Return the key of an error: pydantic's location without the names of members of unions."""
    path: list[str] = []
    at = shape.root()
    for part in loc:
        section = at.section
        if at.kinds and part in at.kinds:
            at = ValueShape(section=at.kinds[str(part)])
        elif section and (part in shape.fields(section) or kind == "extra_forbidden"):
            path.append(str(part))
            at = at.inside(str(part))
        elif at.values and (at.choices or at.text):  # the name of a member, where words are also valid
            at = replace(at, choices=(), text=False)
        elif at.values and part != "[key]":
            path.append(str(part))
            at = at.values
        elif at.items and isinstance(part, int):
            path.append(str(part))
            at = at.items
        else:
            break
    return (*path, "kind") if at.kinds and kind.startswith("union_tag") else tuple(path)


def _find(tree: Table, path: Path) -> tuple[Node | None, ValueShape, str]:
    """Return what is written at the path, what is valid there, and the nearest place in the file."""
    node: Node | None = tree
    at, where = shape.root(), tree.where
    for key in path:
        if not (key == "kind" and at.kinds):
            at = at.items if at.items else at.inside(key, node)
        if isinstance(node, Table) and (entry := node.entries.get(key)):
            node, where = entry.node, entry.where if isinstance(entry.node, Table) else entry.node.where
        elif isinstance(node, Items) and key.isdigit() and int(key) < len(node.items):
            node = node.items[int(key)]
            where = node.where
        else:
            node = None
    return node, at, where


def _key_place(tree: Table, path: Path) -> str:
    parent, _, where = _find(tree, path[:-1])
    entry = parent.entries.get(path[-1]) if isinstance(parent, Table) else None
    return entry.where if entry else where


def _other_tools() -> Any:
    """Return the module of other tools' keys: `key_hint(path, node, tree)`, `value_hint(key, node)`, `key_rows()`.

    It is in a package above this one, so `lockstep/__init__.py` names it; it is imported for the first such message.
    """
    return importlib.import_module(lockstep.KEY_HINTS)


def _suggested_key(path: Path, siblings: Sequence[str], node: Node, tree: Table) -> str:
    if len(path) == 1 and (answer := _FLAGS.get(path[0].lower().replace("-", "_"))):
        return answer
    tools = _other_tools()
    longer = next((key for key in siblings if key.startswith(f"{path[-1]}_")), None)
    near = (closest_match(path[-1], siblings, cutoff=0.8) or longer) if len(path) > 1 else None
    section = f"{'.'.join(path[:-1])}."
    if path[-1] in get_args(Unit) and "every" in siblings:
        return f"a unit, not a key; write `{section}every: N {path[-1]}`"
    if near and not (tools.target_of(path) or "").startswith(section):
        return f"unknown key; did you mean {near}?"
    if hint := tools.key_hint(path, node, tree) or _elsewhere(path):
        return str(hint)
    words = (siblings, 0.8), (tools.key_rows(), 0.8), (siblings, 0.55)
    if near := next(filter(None, (closest_match(path[-1], known, cutoff) for known, cutoff in words)), None):
        hint = "" if near in siblings else tools.key_hint((*path[:-1], near), node, tree)
        return f"unknown key; did you mean {near}? {hint}".rstrip()
    return f"unknown key; the keys here are {', '.join(siblings)}"


_FLAGS = {
    **dict.fromkeys(
        ("config", "config_file", "config_path", "cfg"), "name the file without a flag: lockstep train FILE"
    ),
    **dict.fromkeys(("dry_run", "dryrun"), "`lockstep plan` shows what a run will be, and starts none"),
}


def _elsewhere(path: Path) -> str | None:
    """Return where the same name is a key, the keys of the same section first."""
    places = [key for key in dict.fromkeys(shape.all_keys()) if key[-1] == path[-1] and "NAME" not in key]
    if any(len(key) == len(path) and key[:-1] == path[:-1] for key in places):
        return "only other kinds have this key"
    places.sort(key=lambda key: key[:1] != path[:1])
    return f"unknown here; write {' or '.join('.'.join(key) for key in places[:3])}" if places else None
