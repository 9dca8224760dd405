"""HTML pages from templates, each a file that fetches nothing.

A content security policy forbids it, and allows only page.js, by its hash, which shows the values under the pointer.
"""

from __future__ import annotations

import base64
import hashlib
import os
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.core.errors import RunFailed
from lockstep.core.files import write_atomically

if TYPE_CHECKING:
    from jinja2 import Environment

_HERE = Path(__file__).parent


def render(template: str, folder: Path = _HERE, **values: object) -> str:
    """Return a template of `folder`, or of this package, filled with values, which are escaped."""
    text = _environment(folder).get_template(template).render(values)
    return text.encode("utf-8", "replace").decode("utf-8")  # halves of surrogate pairs become ?


def write_page(file: Path, text: str) -> Path:
    """Write a page and return its absolute path. Raises RunFailed."""
    target = Path(os.path.abspath(file))
    try:
        write_atomically(target, text)
    except OSError as error:
        raise RunFailed(f"can't write {target}: {error.strerror or error}") from error
    return target


@cache
def _environment(folder: Path) -> Environment:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup, escape

    environment = Environment(
        loader=FileSystemLoader([folder, _HERE]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    style, script = (Markup((_HERE / name).read_text(encoding="utf-8")) for name in ("page.css", "page.js"))
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    environment.filters["breakable"] = lambda key: escape(key).replace(".", Markup(".<wbr>"))
    environment.globals.update(style=style, script=script, script_hash=allowed)
    return environment
