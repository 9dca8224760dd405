"""The schema for people and for editors, made from the one source of truth.

    python -m lockstep.config.reference              docs/config.md
    python -m lockstep.config.reference --schema     docs/config.schema.json

Descriptions are the docstrings below the attributes. They are parsed from the source here, where they are needed, and
not at import, where they would cost every command 30 ms.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from lockstep.config import schema, shape
from lockstep.config.every import Every
from lockstep.config.shape import ValueShape
from lockstep.config.wording import expectation, yaml_like

_DRAFT = "https://json-schema.org/draft/2020-12/schema"


# --- descriptions -------------------------------------------------------------------------------------------------


@cache
def _docstrings(module: str) -> dict[str, dict[str, str]]:
    """Return class -> attribute -> the string below it."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: _attributes(node) for node in tree.body if isinstance(node, ast.ClassDef)}


def _attributes(node: ast.ClassDef) -> dict[str, str]:
    docstrings = {}
    for statement, after in zip(node.body, node.body[1:], strict=False):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            text = after.value.value if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant) else None
            if isinstance(text, str):
                docstrings[statement.target.id] = inspect.cleandoc(text)
    return docstrings


def description(section: type[BaseModel], key: str) -> str:
    """Return the schema's description of a key; empty where the name is enough."""
    for base in section.__mro__:
        if base is BaseModel:
            break
        if text := _docstrings(base.__module__).get(base.__name__, {}).get(key):
            return text
    return ""


def _implied(section: type[BaseModel], key: str) -> str:
    """Return what an editor shows for a key without a docstring: that of the section, or what a `kind` selects."""
    if key == "kind":
        return f"Selects this kind: {_first_sentence(section)}"
    inner = section.model_fields[key].annotation
    is_section = isinstance(inner, type) and issubclass(inner, BaseModel)
    return (inspect.getdoc(inner) or "") if is_section else ""


def _first_sentence(section: type[BaseModel]) -> str:
    text = " ".join((inspect.getdoc(section) or "").split())
    return text.split(". ")[0].rstrip(".") + "."


# --- JSON Schema ---------------------------------------------------------------------------------------------------


def json_schema() -> dict[str, Any]:
    """Draft 2020-12, with descriptions, for editors to complete and check by."""
    made = schema.Config.model_json_schema()
    sections = {section.__name__: section for section in _all_sections(shape.root())}
    for name, body in (*made.get("$defs", {}).items(), ("Config", made)):
        for key, entry in body.get("properties", {}).items():
            if name in sections and (text := description(sections[name], key) or _implied(sections[name], key)):
                entry["description"] = text
    return {"$schema": _DRAFT, **made, "title": "Lockstep"}


def _all_sections(at: ValueShape) -> list[type[BaseModel]]:
    sections = list(at.sections())
    inner = [entry for section in sections for entry in shape.fields(section).values()]
    inner += [item for item in (at.items, at.values) if item]
    return sections + [section for entry in inner for section in _all_sections(entry)]


# --- docs/config.md ------------------------------------------------------------------------------------------------

_HEAD = """# Config

Every key there is. This page is made from the schema: `python -m lockstep.config.reference > docs/config.md`.

A config is YAML or JSON. `lockstep config show RECIPE` prints every value and where it came from, `lockstep config
check` all mistakes at once, `lockstep config schema` a JSON Schema that editors complete from: put
`# yaml-language-server: $schema=lockstep.schema.json` on the first line of your file.

## Which value wins

From the lowest to the highest:

1. the defaults below;
2. files, from left to right: `lockstep train base.yaml mine.yaml`;
3. environment variables, two underscores between the keys: `LOCKSTEP_OPTIM__LR=3e-4`;
4. the command line: `--optim.lr 3e-4`, `--optim.lr=3e-4`, `optim.lr=3e-4`.

Mappings are merged key by key; lists and single values are replaced. A later `kind` leaves out the keys that only the
earlier kind has, and says so; so does a later `run.epochs` with an earlier `run.steps`. Nothing written under a section
(`optim:`) means its defaults; `null` for a mapping of names (`data.evaluation`) empties it.

Values are YAML 1.2: `3e-4` is a number, `1_000_000` and `1e6` are whole, only `true` and `false` are booleans, and
`no`, `yes`, `on`, `off` are text. Lists and mappings go on the command line as `--optim.betas '[0.9, 0.95]'`.
"""


def markdown() -> str:
    """The reference page."""
    config = schema.Config
    top = [(key, entry) for key, entry in shape.fields(config).items() if not entry.sections()]
    parts = [_HEAD, f"## The whole config\n\n{_rows(config, [key for key, _ in top])}"]
    for key, entry in shape.fields(config).items():
        if entry.sections():
            parts.append(_section(key, entry, 2))
    return "\n".join(parts)


def _section(path: str, at: ValueShape, level: int) -> str:
    """A heading, and a table; for kinds, a table each; then the sections inside."""
    if at.kinds:
        kinds = [_kind(path, kind, section, level + 1) for kind, section in at.kinds.items()]
        return f"{'#' * level} `{path}`\n\nIts `kind` says which keys it has.\n\n" + "\n".join(kinds)
    assert at.section
    return _body(path, at.section, f"`{path}`", level)


def _kind(path: str, kind: str, section: type[BaseModel], level: int) -> str:
    return _body(path, section, f"`{path}.kind: {kind}`", level)


def _body(path: str, section: type[BaseModel], title: str, level: int) -> str:
    inner = shape.fields(section)
    plain = [key for key in inner if key != "kind" or len(inner[key].choices) > 1]
    plain = [key for key in plain if not inner[key].sections()]
    about = f"{'#' * level} {title}\n\n{inspect.getdoc(section)}\n"
    parts = [about + (f"\n{_rows(section, plain)}" if plain else "")]
    parts += [_section(f"{path}.{key}", entry, level + 1) for key, entry in inner.items() if entry.sections()]
    parts += [_listed(f"{path}.{key}[]", entry.items, level + 1) for key, entry in inner.items() if entry.items]
    return "\n".join(part for part in parts if part)


def _listed(path: str, at: ValueShape, level: int) -> str:
    return _section(path, at, level) if at.sections() else ""


def _rows(section: type[BaseModel], keys: list[str]) -> str:
    lines = ["| key | holds | default | |", "| --- | --- | --- | --- |"]
    for key in keys:
        text = " ".join(description(section, key).split())
        cells = (f"`{key}`", _holds(shape.fields(section)[key]), _default(section, key), text)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _holds(at: ValueShape) -> str:
    if at.values and at.values.sections():
        return f"a mapping of names to one of the kinds {', '.join(at.values.kinds)}"
    return expectation(at)


def _default(section: type[BaseModel], key: str) -> str:
    default = section.model_fields[key].default
    if default is PydanticUndefined:
        return "required"
    return f"`{default if isinstance(default, Every) else yaml_like(default)}`"


def main(arguments: list[str]) -> int:
    """Prints the page, or with --schema the JSON Schema."""
    print(json.dumps(json_schema(), indent=2) if arguments == ["--schema"] else markdown(), end="")
    if arguments == ["--schema"]:
        print()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
