"""The prose of pages and code keeps to the rules of docs/prose.toml, and the rules find what they are for."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def prose(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("prose")


def test_the_prose_keeps_to_the_rules(prose: ModuleType) -> None:
    found = [problem for file in prose.files() for problem in prose.problems(file)]
    assert found == [], "python docs/prose.py"


def test_words_are_spelled_right(prose: ModuleType) -> None:
    pytest.importorskip("codespell_lib")
    assert prose.misspelled(prose.files()) == []


def test_spelling_is_american(prose: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("codespell_lib")
    page = tmp_path / "page.md"
    page.write_text("The behaviour of a run that recieves a signal.\n")
    assert len(prose.misspelled([page])) == 2


@pytest.mark.parametrize(
    ("name", "text", "line"),
    [
        ("page.md", "# Resume\n\nA run that was stopped goes\non from its checkpoint.\n", 3),
        ("page.md", f"One sentence with {'very ' * 45}many words.\n", 1),
        ("code.py", '"""A model of one\'s own."""\nrooms = 1\n', 1),
        ("code.py", "x = 1\ny = 2  # somebody reads this\n", 2),
        ("code.py", 'x = 1\ny = f"The run {x} goes on from here"\n', 2),
        ("run.yaml", "# What is merged.\ndescription: It goes on\n", 2),
    ],
)
def test_a_breach_is_found_with_its_line(prose: ModuleType, tmp_path: Path, name: str, text: str, line: int) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert [problem.rsplit("/", 1)[1].split(":")[1] for problem in prose.problems(file)] == [str(line)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("page.md", "`goes on` is code.\n\n```\nlockstep: somebody\n```\n"),
        ("page.md", "<!-- made -->\n| somebody |\n<!-- /made -->\n"),
        ("code.py", 'text = "somebody"\n'),
        ("run.yaml", "prompt: somebody  # `goes on`\n"),
    ],
)
def test_code_is_no_prose(prose: ModuleType, tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert list(prose.problems(file)) == []
