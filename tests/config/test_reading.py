"""Values of YAML 1.2 and JSON, with their places."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lockstep.config.reading import Leaf, Table, read_json, read_yaml, resolve, to_python


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3e-4", 3e-4),
        ("1e-5", 1e-5),
        ("1E6", 1e6),
        (".5", 0.5),
        ("1.", 1.0),
        ("-1", -1),
        ("007", 7),
        ("0o17", 15),
        ("0x1F", 31),
        ("1_000_000", 1_000_000),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        (".inf", math.inf),
        ("no", "no"),
        ("Yes", "Yes"),
        ("on", "on"),
        ("1_", "1_"),
        ("1e", "1e"),
        ("12:30:45", "12:30:45"),
        ("2024-01-01", "2024-01-01"),
        ("1.2.3", "1.2.3"),
    ],
)
def test_a_plain_scalar_has_its_value_in_yaml_1_2(text: str, value: object) -> None:
    assert resolve(text) == value
    assert type(resolve(text)) is type(value)


def test_quotes_make_text() -> None:
    assert _values("a: '1'\nb: \"true\"\nc: |\n  3\n") == {"a": "1", "b": "true", "c": "3\n"}


def test_a_leaf_knows_its_text_and_place() -> None:
    tree, problems = read_yaml("a:\n  b: 1_0 # ten\n", "x.yaml")
    assert isinstance(tree, Table)
    inner = tree.get("a")
    assert isinstance(inner, Table)
    assert inner.get("b") == Leaf(10, "1_0", "x.yaml:2:6")
    assert inner.entries["b"].where == "x.yaml:2:3"
    assert problems == []


def test_an_alias_stands_for_its_anchor() -> None:
    assert _values("a: &x [1, 2]\nb: *x\n") == {"a": [1, 2], "b": [1, 2]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\nb: {c: 1, c: 2}\n", "x.yaml:2:11: b.c: given twice, first at x.yaml:2:5; keep one"),
        ("a: 1\nb\n", "x.yaml:2:1: this line is not `key: value`"),
        ("a:1\n", "x.yaml:1:1: a config is made of lines `key: value`; a colon is followed by a space"),
        ("- 1\n", "x.yaml:1:1: a config is made of lines `key: value`"),
        ("a: b: c\n", "x.yaml:1:5: a second `: ` on a line; quote the value, or indent what belongs to the key"),
        ("a:\n  b: 1\n c: 2\n", "x.yaml:3:2: the indentation fits none of the lines above"),
        ("a: [1, 2\n", "x.yaml:1:4: this bracket is never closed, or a comma is missing after it"),
        ("a: !!python/name:os.system x\n", "x.yaml:1:4: a: tags such as !!python/name:os.system are not read"),
        ("<<: {a: 1}\n", "x.yaml:1:1: `<<` is not read; name several files instead, which are merged"),
        ("? [a]\n: 1\n", "x.yaml:1:3: a key is one word, not a list or a mapping"),
    ],
)
def test_a_mistake_is_one_problem(text: str, message: str) -> None:
    _, problems = read_yaml(text, "x.yaml")
    assert [str(problem) for problem in problems] == [message]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1 "b": 2}', "x.json:1:9: is not JSON: Expecting ',' delimiter"),
        ("{'a': 1}", "x.json:1:2: is not JSON: Expecting property name enclosed in double quotes"),
        ('{"a": NaN}', "x.json: NaN is not a number in JSON"),
        ('{"a": 1, "a": 2}', "x.json: a key is given twice among a, a"),
    ],
)
def test_invalid_json_is_refused(text: str, message: str) -> None:
    _, problems = read_json(text, "x.json")
    assert [str(problem) for problem in problems] == [message]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(min_size=1, max_size=80), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


KEYS = st.text(min_size=1, max_size=80)  # YAML's reader takes 1,024 characters, escapes included


@example({"next line": "\x85", "separators": "\u2028 \u2029"}, False)
@given(st.dictionaries(KEYS.filter(lambda key: "<<" not in key), json_values, max_size=3), st.booleans())
def test_json_is_read_back_equal(value: dict[str, Any], ascii_only: bool) -> None:
    tree, problems = read_json(json.dumps(value, ensure_ascii=ascii_only), "x.json")
    assert problems == []
    assert tree is not None
    assert to_python(tree) == value


def _values(text: str) -> object:
    tree, problems = read_yaml(text, "x.yaml")
    assert tree is not None
    assert problems == []
    return to_python(tree)
