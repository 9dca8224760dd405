"""Files and folders that appear whole or not at all.

with whole_file(target) as partial: ...        written beside the target under another name, flushed, renamed
with whole_folder(target) as partial: ...      the same for a folder, whose files are flushed first
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.core.flushing import flush


@contextmanager
def whole_file(target: Path) -> Iterator[Path]:
    """Yields where to write. Replaces what is there. Raises OSError."""
    partial = _beside(target, "new")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.touch()
        mode = partial.stat().st_mode
        yield partial
        partial.chmod(mode)  # safetensors lets nobody else read
        flush(partial)
        partial.replace(target)
        flush(target.parent)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def whole_folder(target: Path) -> Iterator[Path]:
    """Yields an empty folder to write to. Replaces the folder that is there. Raises OSError."""
    partial, old = _beside(target, "new"), _beside(target, "old")
    try:
        _remove(partial)
        partial.mkdir(parents=True)
        mode = partial.stat().st_mode & 0o666
        yield partial
        for path in (*partial.rglob("*"), partial):
            if path.is_file():
                path.chmod(mode)
            flush(path)
        _exchange(target, partial, old)
        flush(target.parent)
    finally:
        _remove(partial)
        _remove(old)


def _exchange(target: Path, new: Path, old: Path) -> None:
    if not target.exists():
        new.rename(target)
        return
    target.rename(old)
    try:
        new.rename(target)
    except OSError:
        old.rename(target)
        raise


def _beside(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.{os.getpid()}.{what}")


def _remove(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
