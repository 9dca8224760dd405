"""Converts a tree of what was written to the Python values that the schema checks.

    layers: 1e1       whole number wanted     ->  10
    folder: 2024      text wanted             ->  "2024", as written
    freeze: [a, b]    list wanted             ->  ("a", "b")
    optim:            section, nothing under  ->  {}

Only unambiguous values are converted. Everything else stays as it is, and the schema refuses it.
"""

from __future__ import annotations

from lockstep.config import shape
from lockstep.config.reading import Items, Leaf, Node, Table, to_python
from lockstep.config.shape import ANYTHING, ValueShape


def fit(node: Node, at: ValueShape) -> object:
    """Return the node's value as the shape's type, if it can be converted."""
    if isinstance(node, Table):
        return _fit_table(node, at)
    if isinstance(node, Items):
        return tuple(fit(item, at.items) for item in node.items) if at.items else to_python(node)
    return _fit_leaf(node, at)


def _fit_table(table: Table, at: ValueShape) -> object:
    kind = table.get("kind")
    section = at.select(kind.value if isinstance(kind, Leaf) else None)
    if section is None:
        return {key: fit(entry.node, at.values or ANYTHING) for key, entry in table.entries.items()}
    known = shape.fields(section)
    values = {key: fit(entry.node, known.get(key, ANYTHING)) for key, entry in table.entries.items()}
    for key in shape.required(section):
        if known[key].sections():  # so that what is missing inside is named too
            values.setdefault(key, _fit_table(Table(), known[key]))
    return values


def _fit_leaf(leaf: Leaf, at: ValueShape) -> object:
    value = leaf.value
    if at.anything:
        return value
    if value is None:
        # Nothing written under a section means its defaults; under a mapping of names, none.
        return None if at.nullable or not (at.sections() or at.values) else _fit_table(Table(), at)
    if isinstance(value, bool):
        return value if at.boolean else _fit_text(leaf, at)
    if isinstance(value, int | float):
        return _fit_number(leaf, value, at)
    return value


def _fit_number(leaf: Leaf, value: int | float, at: ValueShape) -> object:
    if at.whole and not at.real and isinstance(value, float) and value.is_integer():
        return int(value)
    if at.whole or at.real or (at.interval and isinstance(value, int)):
        return value
    return _fit_text(leaf, at)


def _fit_text(leaf: Leaf, at: ValueShape) -> object:
    takes_text = at.text or at.choices or at.interval
    return leaf.text if takes_text and leaf.text is not None else leaf.value
