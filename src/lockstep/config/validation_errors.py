"""Converts pydantic's errors to problems that a reader can act on.

    loc ("model", "transformer", "layers")   ->   where run.yaml:3:11, key model.layers
    type int_type, input "abc"               ->   'abc' is not a whole number above 0

    optim.momentun                           ->   did you mean momentum?
    lr                                       ->   write optim.lr
    learnin_rate                             ->   did you mean learning_rate? Lockstep's key is optim.lr
    precision.fp16                           ->   write `precision.compute: fp16`    (another tool's word)

One problem per key: valid values are stated once, however many members of a union refused the value.
"""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, get_args

from pydantic import ValidationError
from pydantic_core import ErrorDetails

import lockstep
from lockstep.config import shape
from lockstep.config.every import Unit
from lockstep.config.layers import PREFIX
from lockstep.config.reading import Items, Leaf, Node, Table, leaves, resolve
from lockstep.config.shape import ValueShape
from lockstep.config.wording import OPEN, expectation, nearest, shown
from lockstep.core.closest import closest_match
from lockstep.core.errors import Problem

Path = tuple[str, ...]
_MAX_KEYS = 100  # keys with a message: nearest matches take milliseconds a key


def problems(error: ValidationError, tree: Table) -> list[Problem]:
    """Return one problem for each key, in the order of the schema."""
    grouped: dict[Path, list[ErrorDetails]] = {}
    for details in error.errors(include_url=False, include_input=False):
        grouped.setdefault(_path(details["loc"], details["type"]), []).append(details)
    answered = dict(list(grouped.items())[:_MAX_KEYS])
    for path in [path for path, group in answered.items() if _only_words(path, group, tree, grouped)]:
        del answered[path]
    reported = [problem for path, group in answered.items() for problem in _about(path, group[0], tree)]
    left = len(grouped) - _MAX_KEYS
    return [*reported, Problem("", "", f"{left:,} more keys are wrong")] if left > 0 else reported


def _only_words(path: Path, group: list[ErrorDetails], tree: Table, grouped: Mapping[Path, object]) -> bool:
    """Return whether only words are refused where a mapping is also valid and is written, with a mistake inside."""
    node, at, _ = _find(tree, path)
    words_alone = all(details["type"] in ("literal_error", "string_type") for details in group)
    deeper = any(other[: len(path)] == path and other != path for other in grouped)
    return words_alone and deeper and at.values is not None and isinstance(node, Table)


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
            return [Problem(_flag_named(message, path, node) or where, key, message)]
    return [Problem(where, key, details["msg"] if node is None else _refused(path, node, at, tree))]


def _flag_named(message: str, path: Path, node: Node | None) -> str | None:
    """Return the last flag or environment variable that set a key named in the message.

    Of several values that contradict each other, it is the newest.
    """
    names = set(re.findall(r"[\w-]+(?:\.[\w-]+)*", message))
    keys = [] if node is None else [(deeper, leaf.where) for deeper, leaf in leaves(node) if deeper]
    named = [
        where
        for deeper, where in keys
        if where.startswith(("--", PREFIX)) and (".".join((*path, *deeper)) in names or (path and deeper[-1] in names))
    ]
    return named[-1] if named else None


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
        near = _suggested_value(str(node.text or node.value), tuple(at.kinds))
        return f"{shown(node)} is not a kind of {'.'.join(path[:-1])}{near or '; one of ' + ', '.join(at.kinds)}"
    key = ".".join(path)
    if at.sections() and key not in _TEXTS and (answer := _other_tools().key_hint(path, node, tree)):
        return str(answer)
    example = next((f"; {text}" for start, text in _EXAMPLES if key.startswith(start)), "")
    of_tool = _other_tools().value_hint(key, node)
    hint = (
        _as_text(key, node)
        or (f"; {of_tool}" if of_tool else "")
        or _meant(key, node)
        or _hint(node, at)
        or _inside(key, node, at)
    )
    return f"{shown(node)} is not {expectation(at)}{hint or example}"


def _inside(key: str, node: Node, at: ValueShape) -> str:
    if not isinstance(node, Leaf) or len(at.sections()) != 1:
        return ""
    text = node.text or node.value
    if key in _NUMBERS and isinstance(node.value, int | float) and not isinstance(node.value, bool):
        return f"; did you mean {_NUMBERS[key]}: {shown(node)}?"
    for name, inner in shape.fields(at.sections()[0]).items():
        if (inner.boolean and isinstance(node.value, bool)) or text in inner.choices:
            return f"; did you mean {key}.{name}: {shown(node)}?"
    return f"; its keys are {', '.join(shape.fields(at.sections()[0]))}"


_NUMBERS = {
    "recovery": "recovery.restarts",
    "recovery.budgets": "recovery.restarts",
    "recovery.watchdog": "recovery.watchdog.end_after",
    "recovery.bad_numbers": "recovery.bad_numbers.rollback_steps",
    "data.bad_samples": "data.bad_samples.limit",
    "data.loader": "data.loader.workers",
    "batch": "batch.global_size",
    "evaluation": "evaluation.every",
    "checkpoint": "checkpoint.every",
    "monitor": "monitor.every",
    "run": "run.steps",
    "launch": "launch.ranks",
}
"""The key for which a number is meant that is written for a section."""


def _as_text(key: str, node: Node) -> str:
    if not isinstance(node, Leaf) or not isinstance(node.value, str):
        return ""
    if key == "parallel.fsdp.wrap" and node.value[:1].isupper():
        return f"; classes are a list: write [{node.value}]"
    return f"; {_TEXTS[key].format(node.value)}" if key in _TEXTS else ""


_DATA = (
    "a name goes into data.train: {{kind: huggingface, name: {0}}}, a folder of tokens into data.train: "
    "{{kind: tokens, folder: {0}}}"
)
_TEXTS = {
    "model": "a name or folder goes into model: {{kind: huggingface, task: causal-lm, pretrained: {0}}}",
    "data": _DATA,
    "data.train": _DATA,
    "run": "a folder goes into run.folder: {0}",
    "checkpoint": "a folder goes into checkpoint.folder; `lockstep train RUN` resumes the run in a folder",
}
_EXAMPLES = (
    ("parallel.tensor_parallel.plan.", "write the style of these modules, such as colwise or rowwise"),
    (
        "parallel.tensor_parallel.plan",
        'a plan has a style for each pattern of modules\' names: write {"layers.*.query": colwise, '
        '"layers.*.out": rowwise}, or auto',
    ),
    ("parallel.deepspeed.config", "write the path of a JSON file, or its content as a mapping"),
)
_WORDS = {
    "recovery.bad_numbers.nonfinite": {"retry": "skip"},
    "launch.device": {"gpu": "cuda", "rocm": "cuda"},
    "checkpoint.best_is": {"max": "highest", "maximum": "highest", "min": "lowest", "minimum": "lowest"},
}
"""Other words for a value, by key."""
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(s|sec|seconds?|m|min|minutes?|h|hours?)", re.IGNORECASE)
_SECONDS = {"s": 1, "m": 60, "h": 3600}
_IN_SECONDS = {
    *(f"launch.{key}" for key in ("timeout", "grace", "nodes_wait")),
    *(f"recovery.watchdog.{key}" for key in ("least", "end_after", "other", "end_start_after")),
    *("recovery.host_wait", "checkpoint.retry_seconds", "monitor.meter_seconds", "data.bad_samples.timeout"),
}
_SWITCHES = {"yes": "true", "on": "true", "y": "true", "no": "false", "off": "false", "n": "false"}


def _meant(key: str, node: Node) -> str:
    if not isinstance(node, Leaf) or not isinstance(node.value, str):
        return ""
    if word := _WORDS.get(key, {}).get(node.value.lower()):
        return f"; did you mean {word}?"
    if key in _IN_SECONDS and (match := _DURATION.fullmatch(node.value.strip())):
        return f"; it is in seconds: write {float(match[1]) * _SECONDS[match[2][0].lower()]:g}"
    return ""


def _hint(node: Node, at: ValueShape) -> str:
    if isinstance(node, Items) and at.length:
        return f"; it has {len(node.items)}"
    if not isinstance(node, Leaf):
        return ""
    text, value = node.text or node.value, node.value
    if at.boolean and isinstance(value, str) and value.lower() in _SWITCHES:
        return f"; {value} is text in YAML 1.2: write {_SWITCHES[value.lower()]}"
    if at.choices and isinstance(text, str) and (near := _suggested_value(text, at.choices)):
        return near
    quoted = node.text is None and isinstance(value, str) and type(resolve(value)) in (int, float)
    if (at.whole or at.real) and quoted:
        return f"; without the quotes it is: {value}"
    bounds = at.real or at.whole
    if bounds and (number := nearest(value, bounds, whole=at.real is None)):
        return f"; the nearest is {number}"
    if at.items and not at.items.sections() and value is not None:
        return f"; write {_in_list(str(text), at)}"
    return ""


def _in_list(text: str, at: ValueShape) -> str:
    item = _in_list(text, at.items) if at.items is not None and at.items.items is not None else text
    return f"[{', '.join([item] * (at.length or 1))}]"


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


def _suggested_key(path: tuple[str, ...], siblings: Sequence[str], node: Node, tree: Table) -> str:
    if hint := _flag_of_others(path, node) or _interval(path, siblings, node) or _in_section(path, siblings):
        return hint
    if hint := _other_tools().key_hint(path, node, tree) or _elsewhere(path):
        return str(hint)
    words = (siblings, 0.8), (_other_tools().key_rows(), 0.8), (siblings, 0.6)
    if near := next(filter(None, (closest_match(path[-1], known, cutoff) for known, cutoff in words)), None):
        hint = "" if near in siblings else _other_tools().key_hint((*path[:-1], near), node, tree)
        return f"unknown key; did you mean {near}? {hint}".rstrip()
    keys = dict.fromkeys(shape.all_keys())
    alike = difflib.get_close_matches(path[-1], {key[-1] for key in keys}, n=1, cutoff=0.75)
    if far := [".".join(key) for key in keys if key[-1] in alike][:3]:
        return f"unknown key; did you mean {_or(far)}?"
    return f"unknown key; the keys here are {', '.join(siblings)}"


def _suggested_value(text: str, choices: Sequence[str]) -> str:
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
    if path[-1] not in get_args(Unit) or "every" not in siblings:
        return None
    value = node.text or node.value if isinstance(node, Leaf) else "N"
    return f"a unit, not a key; write `{'.'.join((*path[:-1], 'every'))}: {value} {path[-1]}`"


def _in_section(path: tuple[str, ...], siblings: Sequence[str]) -> str | None:
    """Return the key of the same section that is spelled almost alike, or has the word in its name.

    At the top, and where another tool's key is one of this section, the table of those keys has the better answer.
    """
    section = ".".join(path[:-1])
    target = _other_tools().target_of(path)
    if not section or (target and target.startswith(f"{section}.")):
        return None
    longer = [key for key in siblings if path[-1] in key.split("_") or _begins(key, path[-1])]
    near = closest_match(path[-1], siblings, cutoff=0.8) or (longer[0] if len(longer) == 1 else None)
    return f"unknown key; did you mean {near}?" if near else None


def _begins(key: str, word: str) -> bool:
    return len(word) > 3 and key.startswith(word)


def _elsewhere(path: tuple[str, ...]) -> str | None:
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
