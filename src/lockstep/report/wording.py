"""Any value of a file in words: flat, and of bounded size whatever it is.

{"commit": "1aaa609", "changed_files": 3}   -->   commit 1aaa609, changed files 3
[gpu, gpu, gpu]                             -->   3 × name NVIDIA H200, memory 140 GiB
"""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping
from datetime import datetime
from typing import TypeGuard

from lockstep.core import formatting
from lockstep.report.curves import capitalised

_LARGEST = 10**18


def described(name: str, value: object, depth: int = 3) -> str:
    """A value of environment.json, by what it is called."""
    if name == "command_line" and isinstance(value, list):
        return shlex.join(in_words(word, depth - 1) for word in value)
    if name == "created":
        return date(value) or in_words(value)
    if name.endswith("_bytes") and is_amount(value):
        return formatting.size(float(value))
    if name == "variables" and isinstance(value, Mapping):
        return "\n".join(f"{variable}={in_words(setting, depth - 1)}" for variable, setting in value.items())
    return in_words(value, depth)


def in_words(value: object, depth: int = 3) -> str:
    """Any value of JSON or YAML, flat; what lies deeper, or is absurdly large, is left out."""
    if isinstance(value, Mapping | list) and depth <= 0:
        return "…"
    if isinstance(value, Mapping):
        return ", ".join(f"{_label(name)} {described(str(name), part, depth - 1)}" for name, part in value.items())
    if isinstance(value, list):
        parts = Counter(in_words(part, depth - 1) for part in value)
        return "; ".join(part if number == 1 else f"{number} × {part}" for part, number in parts.items())
    if isinstance(value, int) and abs(value) > _LARGEST:
        return "…"
    return "" if value is None else str(value)


def _label(name: object) -> str:
    return str(name).removesuffix("_bytes").replace("_", " ")


def term(name: str) -> str:
    """A key of environment.json as a heading."""
    label = _label(name)
    return {"cpu": "CPU", "cpus": "CPU cores", "gpus": "GPUs"}.get(label, capitalised(label))


def count(value: object) -> str:
    """1,920."""
    return f"{value:,}" if isinstance(value, int) and abs(value) <= _LARGEST else in_words(value)


def is_amount(value: object) -> TypeGuard[float]:
    """Whether it is seconds, bytes or the like."""
    return isinstance(value, int | float) and 0 <= value < _LARGEST


def date(value: object) -> str:
    """21 November 2026, 11:09 UTC+01:00; empty if it is no date."""
    try:
        found = datetime.fromisoformat(value if isinstance(value, str) else "")
    except ValueError:
        return ""
    return f"{found.day} {found:%B %Y, %H:%M} {found:%Z}".rstrip()
