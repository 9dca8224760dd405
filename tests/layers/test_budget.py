"""The size of src only falls: new code is paid for by deletion. When a number has fallen, lower it here."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from layers.law import SOURCE

MOST_LINES = 83_103
MOST_FILES = 487
MOST_CODE = 50_627
"""Lines without docstrings, comments, blank lines and imports."""
MOST_OF_A_PACKAGE = 5_000
LARGER_PACKAGES: dict[str, int] = {}
MOST_SMALL_FILES = 7
"""Files of less than 60 lines, an `__init__` aside, that one other file imports."""
MOST_IN_CIRCLES: dict[str, int] = {}
"""Files of a package that import each other in circles, the types that they name included."""

FILES = {file: ast.parse(file.read_text()) for file in sorted(SOURCE.rglob("*.py"))}


def lines_of(file: Path) -> int:
    return len(file.read_text().splitlines())


def test_src_keeps_within_its_budget() -> None:
    assert sum(map(lines_of, FILES)) <= MOST_LINES, "delete what is no longer needed"
    assert len(FILES) <= MOST_FILES
    assert sum(_code(file) for file in FILES) <= MOST_CODE


def test_packages_keep_within_their_budgets() -> None:
    sizes: dict[str, int] = defaultdict(int)
    for file in FILES:
        sizes[_package(file)] += lines_of(file)
    over = {name: size for name, size in sizes.items() if size > LARGER_PACKAGES.get(name, MOST_OF_A_PACKAGE)}
    assert not over


def test_small_files_have_several_importers() -> None:
    importers: dict[Path, set[Path]] = defaultdict(set)
    for file in FILES:
        for imported in _imported(file):
            importers[imported].add(file)
    small = [file for file in FILES if len(importers[file]) == 1 and lines_of(file) < 60 and file.name != "__init__.py"]
    assert len(small) <= MOST_SMALL_FILES, [str(file.relative_to(SOURCE)) for file in small]


@pytest.mark.parametrize("package", sorted({file.relative_to(SOURCE).parts[0] for file in FILES}))
def test_circles_within_a_package(package: str) -> None:
    graph = {file: {other for other in _imported(file) if _package(other) == package} for file in FILES
             if _package(file) == package}  # fmt: skip
    assert len(_in_circles(graph)) <= MOST_IN_CIRCLES.get(package, 0)


def _package(file: Path) -> str:
    return file.relative_to(SOURCE).parts[0]


def _code(file: Path) -> int:
    """Return the number of lines that are code."""
    left_out: set[int] = set()
    for node in ast.walk(FILES[file]):
        is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        if is_text or isinstance(node, ast.Import | ast.ImportFrom):
            left_out.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    numbered = enumerate(file.read_text().splitlines(), 1)
    return sum(number not in left_out and line.strip()[:1] not in ("", "#") for number, line in numbered)


def _imported(file: Path) -> Iterator[Path]:
    """Yield the files of src that a file imports, anywhere in it."""
    for node in ast.walk(FILES[file]):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lockstep"):
            module = SOURCE.joinpath(*str(node.module).split(".")[1:])
            names = [module / f"{alias.name}.py" for alias in node.names]
            for path in (*names, module.with_suffix(".py"), module / "__init__.py"):
                if path in FILES and path != file:
                    yield path


def _in_circles(graph: Mapping[Path, set[Path]]) -> set[Path]:
    """Return the files from which an import leads back to them."""
    found: set[Path] = set()
    for start in graph:
        reached, todo = set[Path](), [*graph[start]]
        while todo:
            file = todo.pop()
            if file not in reached:
                reached.add(file)
                todo += graph[file]
        if start in reached:
            found.add(start)
    return found
