"""Which known word was probably meant by a misspelt one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def close(word: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The known word that differs least, whatever the case and the kind of dash.

    Args:
        cutoff: share of the signs, from 0 to 1, that both have in common at least.
    """
    plain = {_plain(item): item for item in known}
    near = difflib.get_close_matches(_plain(word), plain, n=1, cutoff=cutoff)
    return plain[near[0]] if near else None


def _plain(word: str) -> str:
    return word.lower().replace("-", "").replace("_", "")
