"""Waits for what other processes do."""

from __future__ import annotations

import time
from pathlib import Path


def wait_for(paths: list[Path], seconds: float = 20.0) -> None:
    """Wait until all paths exist."""
    deadline = time.monotonic() + seconds
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, f"still missing: {[path for path in paths if not path.exists()]}"
        time.sleep(0.01)
