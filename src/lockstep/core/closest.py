"""Misspelled names: the known name that is closest, and the sentence that offers it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest_match(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name most similar to `name`, ignoring case, dashes and underscores; None if none is similar.

    Args:
        name: what was written.
        known: the names that exist.
        cutoff: least similarity, from 0 to 1.
    """
    plain = {_plain(item): item for item in known}
    near = difflib.get_close_matches(_plain(name), plain, n=1, cutoff=cutoff)
    return plain[near[0]] if near else None


def did_you_mean(name: str, known: Iterable[str], others: str = "there are") -> str:
    """Return `did you mean X?` for the closest known name, or a list of all that begins with `others`."""
    names = list(known)
    near = closest_match(name, names)
    return f"did you mean {near}?" if near else f"{others} {', '.join(names)}"


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
