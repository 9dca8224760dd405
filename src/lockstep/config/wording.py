"""Shapes and values as text for messages.

ValueShape(whole=Range(gt=0), choices=("auto",))   ->   a whole number above 0, or auto
True, None, "abc", 0.0003                          ->   true, null, 'abc', 0.0003
"""

from __future__ import annotations

import math

from lockstep.config.reading import Items, Leaf, Node, Table, to_python
from lockstep.config.shape import Range, ValueShape

OPEN = "???"
"""A value that is left to decide, as `config import` writes it."""

_LONGEST = 60


def expectation(at: ValueShape) -> str:
    """Return the valid values as text that follows "is not"."""
    valid = []
    if at.boolean:
        valid.append("true or false")
    if at.whole:
        valid.append(f"a whole number{_bounds(at.whole)}")
    if at.real:
        valid.append(f"a number{_bounds(at.real)}")
    if at.text:
        valid.append("text")
    if at.interval:
        valid.append("an interval such as 100 steps or 1 epoch")
    if at.items:
        inner = _plural(at.items)
        valid.append(f"a list of {at.length} {inner}" if at.length else f"a list of {inner}")
    elif at.values or at.sections():
        valid.append("a mapping of names to values" if at.values else "a mapping")
    if at.choices:
        valid.append(at.choices[0] if len(at.choices) == 1 else f"one of {', '.join(at.choices)}")
    if at.nullable:
        valid.append("null")
    return ", or ".join(valid) or "a value"


def _plural(item: ValueShape) -> str:
    if item.items:
        return f"lists of {item.length or ''} {_plural(item.items)}".replace("  ", " ")
    if item.whole:
        return f"whole numbers{_bounds(item.whole)}"
    return "mappings" if item.sections() else "numbers" if item.real else "text"


def _bounds(bounds: Range) -> str:
    low = f"{bounds.ge:g}" if bounds.ge is not None else None
    if bounds.le is not None:
        return f" from {low} to {bounds.le:g}" if low else f" up to {bounds.le:g}"
    if bounds.lt is not None:
        if bounds.gt is not None:
            return f" above {bounds.gt:g} and below {bounds.lt:g}"
        exponent = math.log2(bounds.lt)
        power = bounds.lt > 10**6 and exponent.is_integer()
        return f" from {low} up to, not including, {f'2^{exponent:.0f}' if power else f'{bounds.lt:g}'}"
    if bounds.gt is not None:
        return f" above {bounds.gt:g}"
    return f" of {low} or more" if low else ""


def nearest(value: object, bounds: Range, whole: bool) -> str | None:
    """Return the nearest number within the bounds, if there is one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    number = round(value) if whole else value
    if bounds.ge is not None:
        number = max(number, bounds.ge)
    if bounds.gt is not None and number <= bounds.gt:
        if not whole:
            return None
        number = int(bounds.gt) + 1
    if bounds.le is not None:
        number = min(number, bounds.le)
    if bounds.lt is not None and number >= bounds.lt:
        if not whole:
            return None
        number = int(bounds.lt) - 1
    return f"{number:g}" if isinstance(number, float) else str(number)


def shown(node: Node) -> str:
    """Return a value as it was written: numbers as typed, text in quotes."""
    if isinstance(node, Leaf) and isinstance(node.value, int | float) and node.text:
        return node.text
    if isinstance(node, Table):
        return "a mapping"
    text = yaml_like(to_python(node) if isinstance(node, Items) else node.value)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def yaml_like(value: object) -> str:
    """Return a Python value in YAML's spelling, on one line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(yaml_like(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {yaml_like(item)}' for key, item in value.items())}}}"
    return repr(value) if isinstance(value, str | int | float) else str(value)
