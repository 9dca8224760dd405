"""HTML that escapes by itself: what was made here is markup, any other text is text.

    element("p", "a < b", class_="note")   ->   <p class="note">a &lt; b</p>

So a value from a file can't become an element, wherever it lands: forgetting is safe.
"""

from __future__ import annotations

import html
from collections.abc import Iterable


class Markup(str):
    """Text that is HTML already. Added to other text, or formatted, it is plain text again."""

    __slots__ = ()


def escaped(text: str) -> Markup:
    """Markup as it is, everything else escaped; halves of surrogate pairs, which no file can hold, become `?`."""
    if isinstance(text, Markup):
        return text
    return Markup(html.escape(text.encode("utf-8", "replace").decode("utf-8")))


def joined(parts: Iterable[str], between: str = "") -> Markup:
    """One after the other."""
    return Markup(escaped(between).join(map(escaped, parts)))


def element(tag: str, *children: str, **attributes: str | float | None) -> Markup:
    """`class_` is class, `data_low` is data-low; an attribute of None is left out."""
    named = ((name.strip("_").replace("_", "-"), value) for name, value in attributes.items() if value is not None)
    written = "".join(f' {name}="{escaped(str(value))}"' for name, value in named)
    return Markup(f"<{tag}{written}>{joined(children)}</{tag}>")
