"""Keeps stdout for the JSON document of `--json`: everything else that is printed goes to stderr."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

_kept: list[str] | None = None  # the documents of `json_only`; None outside of it


def emit(value: Any, *, indent: int | None = None) -> None:
    """Print `value` as JSON at the end of `json_only`; outside of it, which is without `--json`, do nothing."""
    if _kept is not None:
        _kept.append(json.dumps(_finite(value), default=str, indent=indent, allow_nan=False))


@contextmanager
def json_only(wanted: bool) -> Iterator[None]:
    """Send what this process and its children print in the block to stderr; then print what `emit` got on stdout."""
    global _kept
    if not wanted:
        yield
        return
    stdout, saved, kept = sys.stdout, None, list[str]()
    stdout.flush()
    with suppress(OSError):  # one of them is closed
        saved = os.dup(1)
        os.dup2(2, 1)
    sys.stdout, _kept = sys.stderr, kept
    try:
        yield
    finally:
        sys.stderr.flush()
        sys.stdout, _kept = stdout, None
        if saved is not None:
            os.dup2(saved, 1)
            os.close(saved)
        for text in kept:
            print(text, flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(part) for key, part in value.items()}
    return [_finite(part) for part in value] if isinstance(value, list | tuple) else value
