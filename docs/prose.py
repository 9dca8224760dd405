"""Checks the prose of the project, in its pages and in its code: `python docs/prose.py [FILE or FOLDER ...]`.

    rules       docs/prose.toml: words with what to write instead, and the longest sentence
    spelling    codespell, with American spelling

In Markdown, code is left out, and so is text between <!-- NAME --> and <!-- /NAME -->, which has other sources. In
Python, comments, docstrings and messages (strings of at least four words) are read; in YAML and shell scripts,
comments; in YAML also `description`.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RULES: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
_NOT_PROSE = re.compile(
    r"^```.*?^```$|<!-- ([\w-]+) -->\n.*?<!-- (?:/|end of )\1 -->|<!--.*?-->|``[^`]+``|`[^`]*`|\]\([^)]*\)|^#+ ",
    re.DOTALL | re.MULTILINE,
)
_BLOCK_END = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*|>]|\d+\.|!!!)\s?)|^#.*$", re.MULTILINE)


def files() -> list[Path]:
    """Return the files whose prose is checked."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
    folders = ("recipes", "examples", "src", "tests", "benchmarks", "drills")
    code = [file for folder in folders for file in sorted((ROOT / folder).rglob("*"))]
    return pages + [file for file in code if file.suffix in (".py", ".yaml", ".sh")]


def main(arguments: Sequence[str]) -> int:
    """Print each problem with its file and line; return 1 if there is one."""
    named = [Path(name).resolve() for name in arguments]
    checked = [file for path in named for file in (sorted(path.rglob("*.py")) if path.is_dir() else [path])] or files()
    lines = [*(problem for file in checked for problem in problems(file)), *misspelled(checked)]
    if lines:
        print("\n".join(lines))
    return int(bool(lines))


def problems(file: Path) -> Iterator[str]:
    """Yield the breaches of the rules in a file, as `FILE:LINE: what`."""
    text = prose(file)
    name = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file
    flat = text.replace("\n", " ")
    short = re.sub(" {2,}", " ", flat)  # most of a file's text is code, here spaces
    for pattern, instead in RULES["words"].items():
        for match in re.finditer(pattern, flat, re.IGNORECASE) if re.search(pattern, short, re.IGNORECASE) else ():
            line = text.count("\n", 0, match.start()) + 1
            yield f"{name}:{line}: {match[0]!r}: write {instead}"
    if file.suffix == ".md":
        for start, sentence in sentences(text):
            words = len(re.findall(r"\w[\w'’.-]*", sentence))
            if words > RULES["longest_sentence"]:
                yield f"{name}:{text.count(chr(10), 0, start) + 1}: a sentence of {words} words: split it"


def sentences(text: str) -> Iterator[tuple[int, str]]:
    """Yield the sentences of paragraphs and list items, with where each starts; tables are left out."""
    position = 0
    for block in [*_BLOCK_END.finditer(text), None]:
        end = block.start() if block else len(text)
        paragraph = text[position:end]
        if not paragraph.lstrip().startswith("|"):
            for sentence in re.finditer(r"\S.*?(?:[.!?:;](?=\s)|\Z)", paragraph, re.DOTALL):
                yield position + sentence.start(), sentence[0]
        position = block.end() if block else end


@cache
def prose(file: Path) -> str:
    """Return the file's text with everything that isn't prose replaced by spaces, so that lines keep their numbers."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        return _NOT_PROSE.sub(lambda code: _blank(code[0]), text)
    spans = _python(text) if file.suffix == ".py" else _comments(text)
    kept = _blank(text)
    starts = [0, *accumulate(map(len, text.splitlines(keepends=True)))]
    for (row, column), (end_row, end_column) in spans:
        start, end = starts[row - 1] + column, starts[end_row - 1] + end_column
        kept = kept[:start] + re.sub(r"`[^`]*`", lambda code: _blank(code[0]), text[start:end]) + kept[end:]
    return kept


def _blank(text: str) -> str:
    """Return spaces instead of code, with a word in front, so that the text around it doesn't become one phrase."""
    blank = re.sub(r"[^\n]", " ", text)
    return "x" + blank[1:] if text.startswith("`") and not text.startswith("```") else blank


def _python(text: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    lines = text.splitlines()
    taken: dict[int, list[tuple[int, int]]] = {}  # the columns that strings take in a line
    for node in _strings(ast.parse(text)):
        row, end_row = node.lineno, node.end_lineno or 0
        start, end = node.col_offset, node.end_col_offset or 0
        for number in range(row, end_row + 1):
            whole = (start if number == row else 0, end if number == end_row else len(lines[number - 1].encode()))
            taken.setdefault(number, []).append(whole)
        if isinstance(node, ast.Expr) or _is_message(node):
            yield (row, start), (end_row, end)
    for number, line in enumerate(lines, 1):
        signs = (match.start() for match in re.finditer("#", line)) if "#" in line else ()
        spans = taken.get(number, ())
        for sign in signs:
            offset = len(line[:sign].encode())  # as ast counts
            if not any(start <= offset < end for start, end in spans):
                yield (number, sign), (number, len(line))
                break


def _strings(tree: ast.Module) -> Iterator[ast.expr | ast.Expr]:
    """Yield the strings of a file, of f-strings the whole and its parts; a docstring comes as its statement."""
    left: list[ast.AST] = [tree]
    while left:
        node = left.pop()
        text = node.value if isinstance(node, ast.Expr) else None
        if isinstance(node, ast.Expr) and isinstance(text, ast.Constant) and isinstance(text.value, str):
            yield node
            continue
        if isinstance(node, ast.Constant | ast.JoinedStr):
            yield node
        for name in node._fields:
            value = getattr(node, name, None) if name != "ctx" else None
            if isinstance(value, ast.AST):
                left.append(value)
            elif isinstance(value, list):
                left += [each for each in value if isinstance(each, ast.AST)]


def _is_message(node: ast.AST) -> bool:
    """Return whether a string is a sentence for people: it has four words with spaces between them."""
    if isinstance(node, ast.JoinedStr):
        text = "".join(part.value if isinstance(part, ast.Constant) else "x" for part in node.values)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        text = node.value
    else:
        return False
    return len(re.findall(r"(?<!\S)[A-Za-z']+[,.:;]?(?!\S)", text)) >= 4


def _comments(text: str) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.search(r"(?:^|\s)#(?!!| yaml-language-server|SBATCH).*|^description:.*", line):
            yield (number, match.start()), (number, match.end())


def misspelled(checked: Sequence[Path]) -> list[str]:
    """Return codespell's findings in the prose; none where it isn't installed."""
    with tempfile.TemporaryDirectory() as folder:
        for file in checked:
            copy = Path(folder, file.relative_to(ROOT) if file.is_relative_to(ROOT) else file.name)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(prose(file), encoding="utf-8")
        command = [sys.executable, "-m", "codespell_lib", "--builtin", "clear,rare,en-GB_to_en-US", "."]
        ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    return [line.removeprefix("./") for line in ran.stdout.splitlines()]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
