"""Suggestions for keys and values that don't exist.

optim.momentun   ->   did you mean momentum?
recovery.budget  ->   did you mean budgets?                   (before a key of another section, or tool)
lr               ->   write optim.lr
learnin_rate     ->   did you mean learning_rate? Lockstep's key is optim.lr
precision.fp16   ->   write `precision.compute: fp16`        (another tool's word)
checkpoint.steps ->   write `checkpoint.every: 5 steps`
compute: bf-16   ->   did you mean bf16?
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from typing import Any, get_args

import lockstep
from lockstep.config import shape
from lockstep.config.every import Unit
from lockstep.config.reading import Leaf, Node, Table
from lockstep.core.closest import closest_match


def other_tools() -> Any:
    """Return the module of other tools' keys: `key_hint(path, node, tree)`, `value_hint(key, node)`, `key_rows()`.

    It is in a package above this one, so `lockstep/__init__.py` names it; it is imported for the first such message.
    """
    return importlib.import_module(lockstep.KEY_HINTS)


def for_key(path: tuple[str, ...], siblings: Sequence[str], node: Node, tree: Table) -> str:
    """Return a sentence about an unknown key."""
    if hint := _flag_of_others(path, node) or _interval(path, siblings, node) or _in_section(path, siblings):
        return hint
    if hint := other_tools().key_hint(path, node, tree) or _elsewhere(path):
        return str(hint)
    words = (siblings, 0.8), (other_tools().key_rows(), 0.8), (siblings, 0.6)
    if near := next(filter(None, (closest_match(path[-1], known, cutoff) for known, cutoff in words)), None):
        hint = "" if near in siblings else other_tools().key_hint((*path[:-1], near), node, tree)
        return f"unknown key; did you mean {near}? {hint}".rstrip()
    keys = dict.fromkeys(shape.all_keys())
    alike = difflib.get_close_matches(path[-1], {key[-1] for key in keys}, n=1, cutoff=0.75)
    if far := [".".join(key) for key in keys if key[-1] in alike][:3]:
        return f"unknown key; did you mean {_or(far)}?"
    return f"unknown key; the keys here are {', '.join(siblings)}"


def for_value(text: str, choices: Sequence[str]) -> str:
    """Return "; did you mean X?" or an empty text."""
    near = closest_match(text, choices)
    return f"; did you mean {near}?" if near else ""


def _flag_of_others(path: tuple[str, ...], node: Node) -> str | None:
    """Return what does the same as a flag of other commands."""
    word = path[-1].lower().replace("-", "_")
    if len(path) > 1 or word not in _FLAGS:
        return None
    value = node.text or node.value if isinstance(node, Leaf) else None
    return _FLAGS[word].format("FILE.yaml" if value in (None, True) else value)


_FLAGS = {
    **dict.fromkeys(
        ("config", "config_file", "config_path", "cfg", "yaml"), "a config is named without a flag: lockstep train {}"
    ),
    **dict.fromkeys(
        ("dry_run", "dryrun", "simulate"),
        "`lockstep plan` shows what a run will be, and starts none; a launcher's flags stand before the verb: "
        "lockstep launch slurm --dry-run train",
    ),
}


def _interval(path: tuple[str, ...], siblings: Sequence[str], node: Node) -> str | None:
    """Return the right key for `steps: 5` next to `every`."""
    if path[-1] not in get_args(Unit) or "every" not in siblings:
        return None
    value = node.text or node.value if isinstance(node, Leaf) else "N"
    return f"a unit, not a key; write `{'.'.join((*path[:-1], 'every'))}: {value} {path[-1]}`"


def _in_section(path: tuple[str, ...], siblings: Sequence[str]) -> str | None:
    """Return the key of the same section that is spelled almost alike, or has the word in its name.

    At the top, and where another tool's key is one of this section, the table of those keys has the better answer.
    """
    section = ".".join(path[:-1])
    target = other_tools().target_of(path)
    if not section or (target and target.startswith(f"{section}.")):
        return None
    longer = [key for key in siblings if path[-1] in key.split("_") or _begins(key, path[-1])]
    near = closest_match(path[-1], siblings, cutoff=0.8) or (longer[0] if len(longer) == 1 else None)
    return f"unknown key; did you mean {near}?" if near else None


def _begins(key: str, word: str) -> bool:
    """Return whether a word of four letters or more is the beginning of a key, as `async` is."""
    return len(word) > 3 and key.startswith(word)


def _elsewhere(path: tuple[str, ...]) -> str | None:
    """Return where the same word is a key: here, for another kind; or in other sections."""
    places = [key for key in dict.fromkeys(shape.all_keys()) if key[-1] == path[-1]]
    for key in places:
        if len(key) == len(path) and all(name in ("NAME", word) for name, word in zip(key, path, strict=True)):
            return f"only kind {_or(_kinds(key))} has this key"
    places.sort(key=lambda key: key[:1] != path[:1])  # those of the same section first
    return f"unknown here; write {_or(['.'.join(key) for key in places[:3]])}" if places else None


def _kinds(key: tuple[str, ...]) -> tuple[str, ...]:
    at = shape.root()
    for name in key[:-1]:
        at = at.inside(name)
    return tuple(kind for kind, section in at.kinds.items() if key[-1] in shape.fields(section))


def _or(words: Sequence[str]) -> str:
    return " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
