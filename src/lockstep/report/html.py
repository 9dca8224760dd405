"""HTML pages from templates: each is one file that needs nothing else, today or in ten years.

No font, script or picture is fetched: a content security policy forbids it, and allows only page.js, by its hash. A
page is complete without its script, which shows the values under the pointer.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jinja2 import Environment

_HERE = Path(__file__).parent


def render(template: str, folder: Path = _HERE, **values: object) -> str:
    """Return a template filled with values, which are escaped: text from a file never becomes markup.

    Args:
        template: name of a file in `folder`, or beside this one; it may extend and import both.
        folder: the caller's templates.
        values: what the template names.
    """
    text = _environment(folder).get_template(template).render(values)
    return text.encode("utf-8", "replace").decode("utf-8")  # halves of surrogate pairs, which no file holds, become ?


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
    environment.filters["breakable"] = lambda text: escape(text).replace(
        ".", Markup(".<wbr>")
    )  # of a key of the config
    environment.globals.update(style=style, script=script, script_hash=allowed)
    return environment
