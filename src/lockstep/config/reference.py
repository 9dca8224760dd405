"""Generates the reference page and the JSON Schema from the config's schema.

    python -m lockstep.config.reference              docs/config.md
    python -m lockstep.config.reference --schema     docs/config.schema.json

Descriptions are the docstrings below the attributes. They are parsed from the source here, and not at import
(pydantic's `use_attribute_docstrings`), where they would cost every command 30 ms.
"""

from __future__ import annotations

import ast
import inspect
import json
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path
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
    docstrings: dict[str, dict[str, str]] = {}
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    for node in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for statement, after in pairwise(node.body):
            match statement, after:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docstrings.setdefault(node.name, {})[name] = inspect.cleandoc(text)
    return docstrings


def description(section: type[BaseModel], key: str) -> str:
    """Return the schema's description of a key; empty where the name is enough."""
    own = section.__mro__[: section.__mro__.index(BaseModel)]
    texts = (_docstrings(base.__module__).get(base.__name__, {}).get(key) for base in own)
    return next((text for text in texts if text), "")


def _implied(section: type[BaseModel], key: str) -> str:
    """Return an editor's text for a key without a docstring: the docstring of its section, or of the selected kind."""
    if key == "kind":
        first = " ".join((inspect.getdoc(section) or "").split()).split(". ")[0].rstrip(".")
        return f"Selects this kind: {first}."
    inner = section.model_fields[key].annotation
    is_section = isinstance(inner, type) and issubclass(inner, BaseModel)
    return (inspect.getdoc(inner) or "") if is_section else ""


# --- JSON Schema ---------------------------------------------------------------------------------------------------


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (draft 2020-12) with descriptions, for editors."""
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

_HEAD = Path(__file__).with_suffix(".md")


def markdown() -> str:
    """Return the reference page."""
    config = schema.Config
    top = [(key, entry) for key, entry in shape.fields(config).items() if not entry.sections()]
    parts = [_HEAD.read_text(encoding="utf-8"), f"## The whole config\n\n{_rows(config, [key for key, _ in top])}"]
    for key, entry in shape.fields(config).items():
        if entry.sections():
            parts.append(_section(key, entry, 2))
    return "\n".join(parts)


def _section(path: str, at: ValueShape, level: int) -> str:
    """Return a heading and a table, for each kind if there are several; then the sections inside."""
    if at.kinds:
        kinds = [_body(path, at.kinds[kind], f"`{path}.kind: {kind}`", level + 1) for kind in at.kinds]
        return f"{'#' * level} `{path}`\n\nIts `kind` determines its keys.\n\n" + "\n".join(kinds)
    assert at.section
    return _body(path, at.section, f"`{path}`", level)


def _body(path: str, section: type[BaseModel], title: str, level: int) -> str:
    inner = shape.fields(section)
    plain = [key for key in inner if key != "kind" or len(inner[key].choices) > 1]
    plain = [key for key in plain if not inner[key].sections()]
    about = f"{'#' * level} {title}\n\n{inspect.getdoc(section)}\n"
    parts = [about + (f"\n{_rows(section, plain)}" if plain else "")]
    parts += [_section(f"{path}.{key}", entry, level + 1) for key, entry in inner.items() if entry.sections()]
    items = {f"{path}.{key}[]": entry.items for key, entry in inner.items() if entry.items and entry.items.sections()}
    return "\n".join([*parts, *(_section(key, at, level + 1) for key, at in items.items())])


def _rows(section: type[BaseModel], keys: list[str]) -> str:
    lines = ["| key | holds | default | |", "| --- | --- | --- | --- |"]
    for key in keys:
        text = " ".join(description(section, key).split())
        at = shape.fields(section)[key]
        kinds = at.values.kinds if at.values else {}
        valid = f"a mapping of names to one of the kinds {', '.join(kinds)}" if kinds else expectation(at)
        cells = (f"`{key}`", valid, _default(section, key), text)
        lines.append(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


def _default(section: type[BaseModel], key: str) -> str:
    default = section.model_fields[key].default
    if default is PydanticUndefined:
        return "required"
    return f"`{default if isinstance(default, Every) else yaml_like(default)}`"


def main(arguments: list[str]) -> int:
    """Print the page, or with --schema the JSON Schema."""
    print(f"{json.dumps(json_schema(), indent=2)}\n" if arguments == ["--schema"] else markdown(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
