"""Suggests the known name that is closest to a misspelled one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def closest_match(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the known name most similar to `name`, ignoring case, dashes and underscores, if any is similar."""
    by_plain_name = {_plain(item): item for item in known}
    nearest = difflib.get_close_matches(_plain(name), by_plain_name, n=1, cutoff=cutoff)
    return by_plain_name[nearest[0]] if nearest else None


def did_you_mean(name: str, known: Iterable[str], others: str = "there are") -> str:
    """Return `did you mean X?` for the closest known name, or all known names after the words `others`."""
    names = list(known)
    nearest = closest_match(name, names)
    return f"did you mean {nearest}?" if nearest else f"{others} {', '.join(names)}"


def hint(name: str, known: Iterable[str]) -> str:
    """Return `; did you mean X?` to end a message with, or nothing."""
    nearest = closest_match(name, known)
    return f"; did you mean {nearest}?" if nearest else ""


def _plain(name: str) -> str:
    return name.lower().replace("-", "").replace("_", "")
