"""Command lines that are printed for copying: a shell reads from each what was meant, whatever the names are."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import lockstep
from lockstep.core.terminal import command_line

SOURCE = Path(lockstep.__file__).parent
ODD = "it's my run's; $(touch x) `y` \"z\" #1 ä"
WORDS = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]))


@given(st.lists(WORDS, min_size=1))
def test_a_shell_reads_the_words_that_were_given(words: list[str]) -> None:
    assert shlex.split(command_line(*words)) == words


@given(WORDS.filter(bool))
def test_a_path_is_never_taken_for_a_flag(name: str) -> None:
    path = Path(name)
    (read,) = shlex.split(command_line(path))
    assert Path(read) == path
    assert not read.startswith("-")


def test_a_real_shell_reads_them_too() -> None:
    line = command_line("printf", "%s\n", ODD, Path("-run"))
    assert subprocess.check_output(["sh", "-c", line], text=True) == f"{ODD}\n./-run\n"


# --- the law: what is put into a command is quoted --------------------------------------------------------------------

COMMAND = re.compile(
    r"(?:^|[\s`(;:])(?:lockstep [a-z]+|kubectl|docker|rm|cd|ssh|scp|sbatch|scancel|python -[cm]|give --volume)"
    r"(?: [\w=.@-]+)* ?(?:--[\w-]+[ =])?$"
)
PLAIN = re.compile(
    r"[A-Z]+|where|verb|name|launcher|host|command\.words\[0\]|record\['job'\]|(planned|job)\.where|"
    r"'\|'\.join\(STARTS\)|.*\.returncode|self\.job\.identifier|self\.name|host\.code"
)
"""Values that need no quotes: constants, names of launchers, verbs, jobs and hosts, and what no command has."""


def unquoted(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each f-string that puts a value into a command without quoting it."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.JoinedStr):
            continue
        before = ""
        for part in node.values:
            if isinstance(part, ast.Constant):
                before = str(part.value)
                continue
            assert isinstance(part, ast.FormattedValue)
            value = ast.unparse(part.value)
            is_quoted = re.match(r"command_line\(|shlex\.(join|quote)\(", value)
            if COMMAND.search(before) and not is_quoted and not PLAIN.fullmatch(value):
                yield part.lineno, f"{before[-40:]}{{{value}}}"
            before = f"{before}x" if COMMAND.search(before) else ""


@pytest.mark.parametrize(
    ("code", "is_found"),
    [
        ("f'resume: lockstep train {folder}'", True),
        ("f'(lockstep export {folder} --to {place})'", True),
        ("f'give --volume {path}:{path}'", True),
        ("f'Delete it: rm {lock}'", True),
        ("f'lockstep train {shlex.quote(folder)}'", False),
        ("f\"resume: {command_line('lockstep', 'train', folder)}\"", False),
        ("f'the run in {folder} has no weights'", False),
    ],
)
def test_the_law_finds_what_it_is_for(code: str, is_found: bool) -> None:
    assert bool(list(unquoted(ast.parse(code)))) == is_found


def test_no_command_is_printed_with_unquoted_values() -> None:
    places = [
        f"{path.relative_to(SOURCE)}:{line}: {text}"
        for path in sorted(SOURCE.rglob("*.py"))
        for line, text in unquoted(ast.parse(path.read_text()))
    ]
    assert places == []
