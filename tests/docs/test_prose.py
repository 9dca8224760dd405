"""The prose of pages and code follows the rules of docs/prose.toml, and breaches are detected."""

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


def test_spelling_is_american(prose: ModuleType, tmp_path: Path) -> None:
    pytest.importorskip("codespell_lib")
    page = tmp_path / "page.md"
    british, wrong = "behaviour", "recieves"
    page.write_text(f"The {british} of a run that {wrong} a signal.\n")
    assert len(prose.misspelled([page])) == 2


@pytest.mark.parametrize(
    ("name", "text", "word", "line"),
    [
        ("page.md", "# Resume\n\nA run that was stopped WORD from its checkpoint.\n", "goes\non", 3),
        ("page.md", f"One sentence with {'WORD ' * 45}many words.\n", "very", 1),
        ("code.py", '"""A model of WORD own."""\nrooms = 1\n', "one's", 1),
        ("code.py", "x = 1\ny = 2  # WORD this\n", "utilizes", 2),
        ("code.py", 'x = 1\ny = f"The run {x} WORD from here"\n', "goes on", 2),
        ("run.yaml", "# What is merged.\ndescription: It WORD\n", "goes on", 2),
    ],
)
def test_a_breach_is_reported_with_its_line(
    prose: ModuleType, tmp_path: Path, name: str, text: str, word: str, line: int
) -> None:
    file = tmp_path / name
    file.write_text(text.replace("WORD", word))
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
def test_code_is_not_prose(prose: ModuleType, tmp_path: Path, name: str, text: str) -> None:
    file = tmp_path / name
    file.write_text(text)
    assert list(prose.problems(file)) == []
