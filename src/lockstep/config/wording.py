"""Words shapes and values for messages.

ValueShape(whole=Range(above=0), choices=("auto",))   ->   a whole number above 0, or auto
True, None, "abc", 0.0003                        ->   true, null, 'abc', 0.0003
"""

from __future__ import annotations

import math

from lockstep.config.reading import Items, Leaf, Node, Table, to_python
from lockstep.config.shape import Range, ValueShape

_LONGEST = 60


def expectation(at: ValueShape) -> str:
    """Return what the key takes, worded to follow "is not"."""
    wants = [*_simple(at), *_composed(at)]
    if at.choices:
        wants.append(at.choices[0] if len(at.choices) == 1 else f"one of {', '.join(at.choices)}")
    if at.nullable:
        wants.append("null")
    return ", or ".join(wants) or "a value"


def _simple(at: ValueShape) -> list[str]:
    wants = []
    if at.boolean:
        wants.append("true or false")
    if at.whole:
        wants.append(f"a whole number{_bounds(at.whole)}")
    if at.real:
        wants.append(f"a number{_bounds(at.real)}")
    if at.text:
        wants.append("text")
    if at.interval:
        wants.append("an interval such as 100 steps or 1 epoch")
    return wants


def _composed(at: ValueShape) -> list[str]:
    if at.items:
        inner = "mappings" if at.items.sections() else "numbers" if at.items.real else "text"
        return [f"a list of {at.length} {inner}" if at.length else f"a list of {inner}"]
    if at.values:
        return ["a mapping of names to values"]
    if at.sections():
        return ["a mapping"]
    return []


def _bounds(bounds: Range) -> str:
    low = f"{bounds.least:g}" if bounds.least is not None else None
    if bounds.most is not None:
        return f" from {low} to {bounds.most:g}" if low else f" up to {bounds.most:g}"
    if bounds.below is not None:
        if bounds.above is not None:
            return f" above {bounds.above:g} and below {bounds.below:g}"
        return f" from {low} up to, not including, {_power(bounds.below)}"
    if bounds.above is not None:
        return f" above {bounds.above:g}"
    return f" of {low} or more" if low else ""


def _power(number: float) -> str:
    exponent = math.log2(number)
    return f"2^{exponent:.0f}" if number > 10**6 and exponent.is_integer() else f"{number:g}"


def nearest(value: object, bounds: Range, whole: bool) -> str | None:
    """Return the nearest number within the bounds, if there is one."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    number = round(value) if whole else value
    if bounds.least is not None:
        number = max(number, bounds.least)
    if bounds.above is not None and number <= bounds.above:
        if not whole:
            return None
        number = int(bounds.above) + 1
    if bounds.most is not None:
        number = min(number, bounds.most)
    if bounds.below is not None and number >= bounds.below:
        if not whole:
            return None
        number = int(bounds.below) - 1
    return f"{number:g}" if isinstance(number, float) else str(number)


def shown(node: Node) -> str:
    """Return a value as it was written: numbers as typed, text in quotes."""
    if isinstance(node, Leaf) and isinstance(node.value, int | float) and node.text:
        return node.text
    if isinstance(node, Table):
        return "a mapping"
    if isinstance(node, Items):
        return _short(yaml_like(to_python(node)))
    return _short(yaml_like(node.value))


def yaml_like(value: object) -> str:
    """Return a Python value in YAML's spelling, on one line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{', '.join(yaml_like(item) for item in value)}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {yaml_like(item)}' for key, item in value.items())}}}"
    return repr(value) if isinstance(value, str | int | float) else str(value)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"
