"""Reads YAML and JSON files to values that know their place in the file.

    optim:            Table
      lr: 3e-4   -->    optim -> Table            run.yaml:1:1
      betas: [...]          lr -> Leaf(0.0003, "3e-4")   run.yaml:2:7
                            betas -> Items(...)          run.yaml:3:10

Plain scalars have the meaning of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema): `3e-4` is a number, `no` is
text; and digits may be grouped as in `1_000_000`. A leaf keeps its text, for keys of type text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias

import yaml

from lockstep.core.errors import Problem
from lockstep.core.files import read_bounded


@dataclass(frozen=True, slots=True)
class Leaf:
    """A scalar.

    Attributes:
        text: As written; None if it was quoted, or came from Python or JSON.
        where: file:line:column, a flag, an environment variable, or empty.
    """

    value: object
    text: str | None = None
    where: str = ""


@dataclass(frozen=True, slots=True)
class Items:
    """A list."""

    items: tuple[Node, ...]
    where: str = ""


@dataclass(frozen=True, slots=True)
class TableEntry:
    """A value, and the place of its key."""

    node: Node
    where: str = ""


@dataclass(frozen=True, slots=True)
class Table:
    """A mapping, in the order of its keys."""

    entries: Mapping[str, TableEntry] = field(default_factory=dict)
    where: str = ""

    def get(self, key: str) -> Node | None:
        entry = self.entries.get(key)
        return entry.node if entry else None


Node: TypeAlias = Leaf | Items | Table

MOST_BYTES = 2**18
MOST_VALUES = 10_000
MOST_DEPTH = 64
_IPV6_PORT = re.compile(r"\[[0-9A-Fa-f]*:[0-9A-Fa-f.]*:[0-9A-Fa-f:.]*(%[\w.-]+)?\]:\d+")  # [::1]:29500 is no list
_TOO_DEEP = f"lists and mappings are nested more than {MOST_DEPTH} deep"
_TOO_MANY = f"holds more than {MOST_VALUES:,} values, including those that aliases repeat"
_NOT_READ = {".toml": "TOML", ".ini": "INI", ".cfg": "INI", ".py": "Python"}


def read_file(path: Path) -> tuple[Table | None, list[Problem]]:
    """Return the file's values, or None if it can't be parsed; and all problems of its form."""
    name = str(path)
    if path.suffix.lower() in _NOT_READ:
        why = f"is {_NOT_READ[path.suffix.lower()]}, and a config is YAML or JSON: sections, with lines `key: value`"
        if path.suffix.lower() == ".toml":
            why += f"; `lockstep config import {name}` converts another tool's config"
        return None, [Problem(name, "", why)]
    try:
        text = read_bounded(path, MOST_BYTES).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        return None, [Problem(name, "", f"is not UTF-8 text (byte {error.start})")]
    except OSError as error:
        return None, [Problem(name, "", f"can't be read: {error.strerror}")]
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    return read_json(text, name) if path.suffix == ".json" else read_yaml(text, name)


def read_json(text: str, name: str) -> tuple[Table | None, list[Problem]]:
    """Return the values and problems of a JSON text, like `read_yaml`."""

    def refuse_constant(word: str) -> float:
        raise ValueError(f"{word} is not a number in JSON")

    def unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
        if len(values := dict(pairs)) < len(pairs):
            raise ValueError(f"a key is given twice among {', '.join(key for key, _ in pairs)}")
        return values

    try:
        tree = from_python(json.loads(text, parse_constant=refuse_constant, object_pairs_hook=unique), name)
    except json.JSONDecodeError as error:
        return None, [Problem(f"{name}:{error.lineno}:{error.colno}", "", f"is not JSON: {error.msg}")]
    except ValueError as error:
        return None, [Problem(name, "", str(error))]
    except RecursionError:
        return None, [Problem(name, "", _TOO_DEEP)]
    return (tree, []) if isinstance(tree, Table) else (None, [Problem(name, "", "is not a JSON object")])


def read_yaml(text: str, name: str) -> tuple[Table | None, list[Problem]]:
    """Return the text's values and problems; `name` is the file in all places."""
    node, problems = _read(text, _Reader(name))
    if node is None or (isinstance(node, Leaf) and node.value is None):
        return (None if problems else Table(where=name)), problems
    if not isinstance(node, Table):
        hint = "; a colon is followed by a space" if isinstance(node, Leaf) and ":" in str(node.text) else ""
        return None, [*problems, Problem(node.where, "", f"a config is made of lines `key: value`{hint}")]
    return Table(node.entries, name), problems


def read_value(text: str, where: str) -> tuple[Node, list[Problem]]:
    """Return a value of the command line or the environment: a YAML list, mapping or quoted text, or else a scalar."""
    if not text.lstrip().startswith(("[", "{", '"', "'")) or _IPV6_PORT.fullmatch(text):
        return Leaf(resolve(text) if text else "", text, where), []
    node, problems = _read(text, _Reader(where, lines=False))
    return node or Leaf(None, None, where), problems


def _read(text: str, reader: _Reader) -> tuple[Node | None, list[Problem]]:
    try:
        root = yaml.compose(text, Loader=_Loader)
        node = None if root is None else reader.node(root, ())
    except yaml.MarkedYAMLError as error:
        return None, [reader.syntax(error)]
    except yaml.YAMLError as error:
        return None, [Problem(reader.name, "", f"is not YAML: {' '.join(str(error).split())}")]
    except RecursionError:
        return None, [Problem(reader.name, "", _TOO_DEEP)]
    return node, reader.problems


def from_python(value: object, where: str = "", depth: int = 0) -> Node:
    """Return Python's values as a tree. Raises RecursionError if they are nested too deep."""
    if depth > MOST_DEPTH:
        raise RecursionError(_TOO_DEEP)
    if isinstance(value, Mapping):
        entries = {str(key): TableEntry(from_python(item, where, depth + 1), where) for key, item in value.items()}
        return Table(entries, where)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):  # OmegaConf's lists, too
        return Items(tuple(from_python(item, where, depth + 1) for item in value), where)
    if callable(plain := getattr(type(value), "tolist", None)):  # NumPy's and torch's arrays and numbers
        return from_python(plain(value), where, depth + 1)
    return Leaf(value, None, where)


def to_python(node: Node) -> object:
    """Return the tree's values, without places."""
    if isinstance(node, Table):
        return {key: to_python(entry.node) for key, entry in node.entries.items()}
    if isinstance(node, Items):
        return [to_python(item) for item in node.items]
    return node.value


def leaves(node: Node, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Node]]:
    """Yield every value that is no mapping, and every empty mapping, with its path."""
    if isinstance(node, Table) and node.entries:
        for key, entry in node.entries.items():
            yield from leaves(entry.node, (*path, key))
    else:
        yield path, node


# --- scalars ----------------------------------------------------------------------------------------------------

_WORDS = {word: value for value, words in (
    (None, ("", "~", "null", "Null", "NULL")),
    (True, ("true", "True", "TRUE")),
    (False, ("false", "False", "FALSE")),
    (float("inf"), (".inf", ".Inf", ".INF", "+.inf", "+.Inf", "+.INF")),
    (float("-inf"), ("-.inf", "-.Inf", "-.INF")),
    (float("nan"), (".nan", ".NaN", ".NAN")),
) for word in words}  # fmt: skip
_DIGITS = "[0-9]+(?:_[0-9]+)*"
_INTEGER = re.compile(rf"[-+]?{_DIGITS}")
_BASED = re.compile(r"0o[0-7]+|0x[0-9a-fA-F]+")
_FLOAT = re.compile(rf"[-+]?(?:\.{_DIGITS}|{_DIGITS}(?:\.(?:{_DIGITS})?)?)(?:[eE][-+]?[0-9]+)?")


def resolve(text: str) -> object:
    """Return the value of a plain scalar."""
    if text in _WORDS:
        return _WORDS[text]
    if _INTEGER.fullmatch(text):
        return int(text) if len(text) < 1000 else text
    if _BASED.fullmatch(text):
        return int(text, 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    return text


# --- nodes --------------------------------------------------------------------------------------------------------

_PLAIN = "tag:yaml.org,2002:str"


class _Loader(yaml.SafeLoader):
    """A loader that leaves plain scalars as text, instead of reading them as YAML 1.1 (`no` is false)."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012


_ADVICE = {
    "'\\t'": "a tab; YAML is indented with spaces",
    "while scanning a quoted scalar": "this quote is never closed",
    "while parsing a flow": "this bracket is never closed, or a comma is missing after it",
    "while scanning an alias": "`*` begins an alias in YAML; quote the text, as in '*.bias'",
    "mapping values are not allowed": "a second `: ` on a line; quote the value, or indent what belongs to the key",
    "while scanning a simple key": "this line is not `key: value`",
    "expected <block end>": "the indentation fits none of the lines above",
}


class _Reader:
    """Converts YAML's nodes; `lines`: whether places have line and column."""

    def __init__(self, name: str, lines: bool = True) -> None:
        self.name = name
        self.problems: list[Problem] = []
        self._lines = lines
        self._number = 0

    def node(self, node: yaml.Node, path: tuple[str, ...]) -> Node:
        where = self._place(node.start_mark)
        self._number += 1  # aliases of aliases make a few lines billions of values
        if self._number > MOST_VALUES or len(path) > MOST_DEPTH:
            raise yaml.YAMLError(_TOO_DEEP if len(path) > MOST_DEPTH else _TOO_MANY)
        if not node.tag.startswith("tag:yaml.org,2002:") or node.tag.startswith("tag:yaml.org,2002:python"):
            self._problem(where, path, f"tags such as {node.tag.replace('tag:yaml.org,2002:', '!!')} are not read")
        if isinstance(node, yaml.MappingNode):
            return self._table(node, path, where)
        if isinstance(node, yaml.SequenceNode):
            return Items(tuple(self.node(item, (*path, str(i))) for i, item in enumerate(node.value)), where)
        if isinstance(node, yaml.ScalarNode) and node.style is None and node.tag == _PLAIN:
            return Leaf(resolve(node.value), node.value, where)
        return Leaf(_join_surrogates(node.value), None, where)

    def _table(self, node: yaml.MappingNode, path: tuple[str, ...], where: str) -> Table:
        entries: dict[str, TableEntry] = {}
        for key_node, value_node in node.value:
            key, place = key_node.value, self._place(key_node.start_mark)
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(place, path, "a key is one word, not a list or a mapping")
            elif key in entries:
                self._problem(place, (*path, key), f"given twice, first at {entries[key].where}; keep one")
            elif key == "<<":
                self._problem(place, path, "`<<` is not read; name several files instead, which are merged")
            else:
                entries[key] = TableEntry(self.node(value_node, (*path, key)), place)
        return Table(entries, where)

    def syntax(self, error: yaml.MarkedYAMLError) -> Problem:
        context, problem = error.context or "", error.problem or ""
        for sign, advice in _ADVICE.items():
            if sign in problem and error.problem_mark:
                return Problem(self._place(error.problem_mark), "", advice)
            if sign in context and error.context_mark:
                return Problem(self._place(error.context_mark), "", advice)
        mark = error.problem_mark or error.context_mark
        return Problem(self._place(mark) if mark else self.name, "", f"is not YAML: {context} {problem}")

    def _place(self, mark: yaml.Mark) -> str:
        return f"{self.name}:{mark.line + 1}:{mark.column + 1}" if self._lines else self.name

    def _problem(self, where: str, path: tuple[str, ...], message: str) -> None:
        self.problems.append(Problem(where, ".".join(path), message))


def _join_surrogates(text: str) -> str:
    """Join surrogate pairs, which YAML's reader takes from JSON's escapes, into single characters."""
    if not any("\ud800" <= sign <= "\udfff" for sign in text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
