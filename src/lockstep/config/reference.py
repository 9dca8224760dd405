"""Generates the JSON Schema from the config's schema.

Descriptions are the docstrings below the attributes, parsed here from the source: pydantic's `use_attribute_docstrings`
would cost every command 30 ms.
"""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from itertools import pairwise
from typing import Any

from pydantic import BaseModel

from lockstep.config import schema, shape
from lockstep.config.shape import ValueShape

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
    """Return the docstring of the section or kind, for a key without one of its own."""
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
