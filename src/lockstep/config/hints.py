"""Other tools' names for a key, for messages about keys and values that the schema doesn't have.

This package knows no other tool. The one that does, above it, is named in `lockstep/__init__.py` beside the homes of
the public names, and is imported when the first such message is written.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Protocol, cast

import lockstep

if TYPE_CHECKING:
    from lockstep.config.reading import Node, Table


class Hints(Protocol):
    """A module that knows other tools' keys."""

    def key_hint(self, path: tuple[str, ...], node: Node, tree: Table) -> str | None:
        """Return what to write instead of an unknown key; None if no tool has it."""

    def value_hint(self, key: str, node: Node) -> str | None:
        """Return what to write instead of another tool's value for a key of ours; None if no tool has it."""


def hints() -> Hints:
    """Return the module that is named."""
    return cast("Hints", importlib.import_module(lockstep.KEY_HINTS))
