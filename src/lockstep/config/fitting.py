"""Converts a tree of written values to the Python values that the schema checks.

    layers: 1e1       a whole number is valid     ->  10
    folder: 2024      text is valid               ->  "2024", as written
    freeze: [a, b]    a list is valid             ->  ("a", "b")
    optim:            a section, nothing under it ->  {}

Only unambiguous values are converted. Everything else stays as it is, and the schema refuses it.
"""

from __future__ import annotations

from lockstep.config import shape
from lockstep.config.reading import Items, Leaf, Node, Table, to_python
from lockstep.config.shape import ValueShape


def fit(node: Node, at: ValueShape) -> object:
    """Return the node's value in the shape's type, if it can be converted."""
    if isinstance(node, Table):
        return _fit_table(node, at)
    if isinstance(node, Items):
        return tuple(fit(item, at.items) for item in node.items) if at.items else to_python(node)
    value = node.value
    if at.anything or isinstance(value, str):
        return value
    if value is None:
        # Nothing written under a section means its defaults; under a mapping of names, none.
        return None if at.nullable or not (at.sections() or at.values) else _fit_table(Table(), at)
    if isinstance(value, bool):
        return value if at.boolean else _fit_text(node, at)
    if isinstance(value, float) and value.is_integer() and at.whole and not at.real:
        return int(value)
    valid = at.whole or at.real or (at.interval and isinstance(value, int))
    return value if valid or not isinstance(value, int | float) else _fit_text(node, at)


def _fit_table(table: Table, at: ValueShape) -> object:
    values = {key: fit(entry.node, at.inside(key, table)) for key, entry in table.entries.items()}
    if (section := at.select(table)) is not None:
        for key in shape.required(section):
            if (inner := at.inside(key, table)).sections():  # so that missing keys inside are reported, too
                values.setdefault(key, _fit_table(Table(), inner))
    return values


def _fit_text(leaf: Leaf, at: ValueShape) -> object:
    takes_text = at.text or at.choices or at.interval
    return leaf.text if takes_text and leaf.text is not None else leaf.value
