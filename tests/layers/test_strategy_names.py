"""Only the strategies' records compare with names of strategies: differences are facts of a record."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from lockstep.strategies.registry import BUILTIN

SOURCE = Path(__file__).parents[2] / "src" / "lockstep"
NAMES = {strategy.name for strategy in BUILTIN} | {
    variant.name for strategy in BUILTIN for variant in strategy.variants
}
ALLOWED = {
    "interop/answers.py": "other tools' names of strategies",
    "interop/importing.py": "other tools' names of strategies",
    "interop/rules.py": "other tools' names of strategies, and for the section of an arithmetic",
    "interop/strategy_rules.py": "other tools' names of strategies",
    "interop/deepspeed.py": "a DeepSpeed config belongs to its strategy",
}
"""Files that still have comparisons, or use the same word for something else; the list only shrinks."""


def comparisons(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of ==, !=, in, startswith, match cases and tables keyed by names of strategies."""
    for node in ast.walk(tree):
        values: list[ast.expr | None] = []
        if isinstance(node, ast.Compare):
            values = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            values = list(node.args) if node.func.attr in ("startswith", "endswith") else []
        elif isinstance(node, ast.Dict) and sum(_names(key) for key in node.keys if key) > 1:
            values = list(node.keys)
        elif isinstance(node, ast.MatchValue):
            values = [node.value]
        if any(_names(value) for value in values if value is not None):
            yield getattr(node, "lineno", 0) or node.value.lineno  # type: ignore[attr-defined]


def _names(value: ast.expr) -> bool:
    if isinstance(value, ast.Tuple | ast.List | ast.Set):
        return any(_names(element) for element in value.elts)
    return isinstance(value, ast.Constant) and value.value in NAMES


@cache
def _files() -> dict[str, list[int]]:
    """Return the lines of each file that compare, by path."""
    paths = {file.relative_to(SOURCE).as_posix(): file for file in sorted(SOURCE.rglob("*.py"))}
    return {
        path: list(comparisons(ast.parse(file.read_text())))
        for path, file in paths.items()
        if not path.startswith("strategies/")
    }


def test_no_file_compares_with_the_name_of_a_strategy() -> None:
    comparing = {path: lines for path, lines in _files().items() if lines and path not in ALLOWED}
    assert comparing == {}, "state the difference in the strategy's record (lockstep/strategies), and read the record"


def test_the_allow_list_has_no_stale_file() -> None:
    files = _files()
    assert not {path for path in ALLOWED if not files.get(path)}


def test_each_kind_of_comparison_is_detected() -> None:
    for text in (
        "x == 'ddp'",
        "x != 'zero2'",
        "x in ('single', 'other')",
        "x.startswith('fsdp')",
        "{'ddp': 1, 'fsdp': 2}",
        "match x:\n    case 'deepspeed':\n        pass",
    ):
        assert list(comparisons(ast.parse(text))), text
    assert not list(comparisons(ast.parse("f(strategy='ddp')")))
