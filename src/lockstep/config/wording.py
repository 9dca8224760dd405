"""Shapes and values as text for messages."""

from __future__ import annotations

import math
import re

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
        plural = re.sub("^a (list|mapping|number|whole number)", r"\1s", expectation(at.items))
        valid.append(f"a list of {at.length or ''} {plural}".replace("  ", " "))
    elif at.values or at.sections():
        valid.append("a mapping of names to values" if at.values else "a mapping")
    if at.choices:
        valid.append(at.choices[0] if len(at.choices) == 1 else f"one of {', '.join(at.choices)}")
    if at.nullable:
        valid.append("null")
    return ", or ".join(valid) or "a value"


def _bounds(bounds: Range) -> str:
    if bounds.ge is not None and bounds.le is not None:
        return f" from {_number(bounds.ge)} to {_number(bounds.le)}"
    words = (("above {}", bounds.gt), ("of {} or more", bounds.ge), ("below {}", bounds.lt), ("up to {}", bounds.le))
    limits = [word.format(_number(limit)) for word, limit in words if limit is not None]
    return f" {' and '.join(limits)}" if limits else ""


def _number(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def nearest(value: object, bounds: Range, whole: bool) -> str | None:
    """Return the nearest number within the bounds, if there is one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    low, high = bounds.ge, bounds.le
    if whole:
        low = low if bounds.gt is None else bounds.gt + 1
        high = high if bounds.lt is None else bounds.lt - 1
    elif bounds.gt is not None or bounds.lt is not None:
        return None
    number = round(value) if whole else value
    number = max(number, number if low is None else low)
    return _number(min(number, number if high is None else high))


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
