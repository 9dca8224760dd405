"""Writes config.md, the page of all keys, and config.schema.json from the config's schema.

python docs/fill_config.py             rewrites both
"""

from __future__ import annotations

import inspect
import json
from pathlib import Path

from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from lockstep.config import shape
from lockstep.config.every import Every
from lockstep.config.reference import description, json_schema
from lockstep.config.schema import Config
from lockstep.config.shape import ValueShape
from lockstep.config.wording import expectation, yaml_like

DOCS = Path(__file__).parent
PAGE, SCHEMA = DOCS / "config.md", DOCS / "config.schema.json"
_HEAD = DOCS / "config_head.txt"


def main() -> None:
    PAGE.write_text(markdown(), encoding="utf-8")
    SCHEMA.write_text(f"{json.dumps(json_schema(), indent=2)}\n", encoding="utf-8")


def markdown() -> str:
    """Return the reference page."""
    config = Config
    top = [(key, entry) for key, entry in shape.fields(config).items() if not entry.sections()]
    parts = [_HEAD.read_text(encoding="utf-8"), f"## The whole config\n\n{_rows(config, [key for key, _ in top])}"]
    for key, entry in shape.fields(config).items():
        if entry.sections():
            parts.append(_section(key, entry, 2))
    return "\n".join(parts)


def _section(path: str, at: ValueShape, level: int) -> str:
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


if __name__ == "__main__":
    main()
