"""Reads YAML and JSON files to values that know their place in the file.

    optim:            Table
      lr: 3e-4   -->    optim -> Table            run.yaml:1:1
      betas: [...]          lr -> Leaf(0.0003, "3e-4")   run.yaml:2:7
                            betas -> Items(...)          run.yaml:3:10

Plain scalars have the meaning of YAML 1.2 (https://yaml.org/spec/1.2.2/#103-core-schema): `3e-4` is a number, only
`true` and `false` are booleans, `no` is text. Beyond it, digits may be grouped as in `1_000_000`. A leaf keeps its
text, for keys whose value is text. JSON is read by the same composer, for its positions.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from lockstep.core.errors import Problem
from lockstep.core.files import read_bounded


@dataclass(frozen=True, slots=True)
class Leaf:
    """A scalar.

    Attributes:
        value: Its value in YAML 1.2.
        text: As written; None if it was quoted, or came from Python.
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

    try:
        json.loads(text, parse_constant=refuse_constant)
    except json.JSONDecodeError as error:
        place = f"{name}:{error.lineno}:{error.colno}"
        return None, [Problem(place, "", f"is not JSON: {error.msg[0].lower()}{error.msg[1:]}")]
    except ValueError as error:
        return None, [Problem(name, "", str(error))]
    except RecursionError:
        return None, [Problem(name, "", _TOO_DEEP)]
    for sign in "\x85\u2028\u2029":  # line breaks of YAML, but not in JSON's strings
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return read_yaml(text.replace("\t", " "), name)  # JSON strings hold no raw tabs; YAML allows none between values


def read_yaml(text: str, name: str) -> tuple[Table | None, list[Problem]]:
    """Return the text's values and problems; `name` is the file in all places."""
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        return None, [_syntax(error, name, text)]
    except yaml.YAMLError as error:
        return None, [Problem(name, "", f"is not YAML: {' '.join(str(error).split())}")]
    if root is None:
        return Table(where=name), []
    reader = _Reader(name)
    node = reader.node(root, ())
    if isinstance(node, Leaf) and node.value is None:
        return Table(where=name), reader.problems
    if not isinstance(node, Table):
        colon = isinstance(node, Leaf) and ":" in str(node.text)
        hint = "; a colon is followed by a space" if colon else ""
        reader.problems.append(Problem(node.where, "", f"a config is made of lines `key: value`{hint}"))
        return None, reader.problems
    return Table(node.entries, name), reader.problems


def read_value(text: str, where: str) -> tuple[Node, list[Problem]]:
    """Return a value of the command line or the environment: a YAML list, mapping or quoted text, or else a scalar."""
    if not text.lstrip().startswith(("[", "{", '"', "'")) or _IPV6_PORT.fullmatch(text):
        return Leaf(resolve(text) if text else "", text, where), []
    try:
        root = yaml.compose(text, Loader=_Loader)
    except yaml.YAMLError as error:
        problem = getattr(error, "problem", None) or str(error)
        return Leaf(None, None, where), [Problem(where, "", f"{text!r} is not YAML: {problem}")]
    if root is None:
        return Leaf(None, text, where), []
    reader = _Reader(where, lines=False)
    return reader.node(root, ()), reader.problems


def from_python(value: object, where: str = "") -> Node:
    """Return Python's values as a tree."""
    if isinstance(value, Mapping):
        return Table({str(key): TableEntry(from_python(item, where), where) for key, item in value.items()}, where)
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):  # OmegaConf's lists, too
        return Items(tuple(from_python(item, where) for item in value), where)
    if callable(plain := getattr(type(value), "tolist", None)):  # NumPy's and torch's arrays and numbers
        return from_python(plain(value), where)
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

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = self._number = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Raise MarkedYAMLError for a tree that is too large, before recursion or memory end."""
        self._depth += 1
        self._number += 1
        if self._depth > MOST_DEPTH or self._number > MOST_VALUES:
            why = _TOO_DEEP if self._depth > MOST_DEPTH else _TOO_MANY
            raise yaml.MarkedYAMLError(problem=why, problem_mark=self.get_mark())
        try:
            return super().compose_node(parent, index)
        finally:
            self._depth -= 1


class _Reader:
    def __init__(self, name: str, lines: bool = True) -> None:
        self.problems: list[Problem] = []
        self._name = name
        self._lines = lines
        self._open: list[int] = []
        self._number = 0

    def node(self, node: yaml.Node, path: tuple[str, ...]) -> Node:
        where = self._where(node)
        if id(node) in self._open:
            self._problem(where, path, "this alias contains itself")
            return Leaf(None, None, where)
        self._number += 1  # aliases of aliases make a few lines billions of values
        if self._number > MOST_VALUES or len(self._open) > MOST_DEPTH:
            if self._number <= MOST_VALUES + 1:
                self._problem(where, (), _TOO_MANY if self._number > MOST_VALUES else _TOO_DEEP)
            self._number = MOST_VALUES + 1
            return Leaf(None, None, where)
        self._open.append(id(node))
        try:
            return self._convert(node, path, where)
        finally:
            self._open.pop()

    def _convert(self, node: yaml.Node, path: tuple[str, ...], where: str) -> Node:
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
            place = self._where(key_node)
            if not isinstance(key_node, yaml.ScalarNode):
                self._problem(place, path, "a key is one word, not a list or a mapping")
                continue
            key = _join_surrogates(key_node.value)
            if key in entries:
                self._problem(place, (*path, key), f"given twice, first at {entries[key].where}; keep one")
            elif key == "<<":
                self._problem(place, path, "`<<` is not read; name several files instead, which are merged")
            else:
                entries[key] = TableEntry(self.node(value_node, (*path, key)), place)
        return Table(entries, where)

    def _where(self, node: yaml.Node) -> str:
        return _place(self._name, node.start_mark) if self._lines else self._name

    def _problem(self, where: str, path: tuple[str, ...], message: str) -> None:
        self.problems.append(Problem(where, ".".join(path), message))


def _join_surrogates(text: str) -> str:
    """Return text whose surrogate pairs, which YAML's reader takes from JSON's escapes, are single characters."""
    if not any("\ud800" <= sign <= "\udfff" for sign in text):
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _place(name: str, mark: yaml.Mark) -> str:
    return f"{name}:{mark.line + 1}:{mark.column + 1}"


# --- errors of syntax ---------------------------------------------------------------------------------------------

_OPENED = tuple(
    f"while {what}"
    for what in (
        "scanning a quoted scalar",
        "parsing a flow sequence",
        "parsing a flow mapping",
        "scanning a simple key",
    )
)
_ADVICE = (
    ("'\\t'", "a tab; YAML is indented with spaces"),
    ("while scanning a quoted scalar", "this quote is never closed"),
    ("while parsing a flow sequence", "this [ is never closed, or a comma is missing after it"),
    ("while parsing a flow mapping", "this { is never closed, or a comma is missing after it"),
    ("while scanning an alias", "`*` begins an alias in YAML; quote the text, as in '*.bias'"),
    ("found undefined alias", "`*` begins an alias in YAML; quote the text, as in '*.bias'"),
    ("while scanning an anchor", "`&` begins an anchor in YAML; quote the text"),
    ("mapping values are not allowed", "a second `: ` on a line; quote the value, or indent what belongs to the key"),
    ("could not find expected ':'", "this line is not `key: value`"),
    ("expected <block end>", "the indentation fits none of the lines above"),
    ("that cannot start any token", "quote the text; this sign has a meaning in YAML"),
    ("expected a single document", "a second document (---) begins here; put it into another file"),
)


def _syntax(error: yaml.MarkedYAMLError, name: str, text: str) -> Problem:
    reason = f"{error.context or ''} {error.problem or ''}"
    if error.problem in (_TOO_DEEP, _TOO_MANY) and error.problem_mark is not None:
        return Problem(_place(name, error.problem_mark), "", error.problem)
    mark = error.problem_mark or error.context_mark
    if (error.context or "").startswith(_OPENED) and "'\\t'" not in reason:
        mark = error.context_mark
    place = _place(name, mark) if mark else name
    for sign, advice in _ADVICE:
        if sign in reason:
            return Problem(place, "", advice)
    return Problem(place, "", f"is not YAML: {' '.join(reason.split())}")
