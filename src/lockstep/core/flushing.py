"""Flushes names to the disk: a new, renamed or deleted file is safe from a power failure only when its folder is."""

from __future__ import annotations

import os
from pathlib import Path


def flush(path: Path) -> None:
    """Flush a file's content, or the names in a folder. Raises OSError."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
