"""Remembers things for this user on this machine: small JSON files in a folder that only the user can write.

    $XDG_STATE_HOME/lockstep/KIND/NAME.json      by default ~/.local/state; folders 0700, files 0600

It is a cache: what can't be written is forgotten, and so are the oldest of too many files. Files and folders that
another user owns or can write are ignored.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MOST_FILES = 1000
_MAX_BYTES = 256 * 1024


def remember(kind: str, name: str, record: Mapping[str, Any]) -> bool:
    """Store or replace the record of this name. Return whether it could be stored."""
    text = json.dumps(record)
    try:
        folder = _folder(kind) if len(text) <= _MAX_BYTES else None
        if folder is None:
            return False
        _write(folder / f"{name}.json", text)
        with os.scandir(folder) as entries:
            files = sorted((entry.stat(follow_symlinks=False).st_mtime, entry.path) for entry in entries)
        for _, path in files[:-_MOST_FILES]:
            with contextlib.suppress(OSError):
                os.unlink(path)
    except OSError:
        return False
    return True


def problem() -> str | None:
    """Return why nothing can be remembered here; None if it can."""
    try:
        folder = _folder("runs")
    except OSError as error:
        return f"{error.filename} can't be written: {error.strerror}"
    if folder is None:
        return f"{_root() or 'HOME'} isn't a folder of this user's alone"
    return None if os.access(folder, os.W_OK) else f"{folder} can't be written"


def recall(kind: str, name: str) -> dict[str, Any] | None:
    """Return the record of this name; None if there is none, or if other users could have written it."""
    try:
        folder = _folder(kind, make=False)
        if folder is None:
            return None
        handle = os.open(folder / f"{name}.json", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(handle, encoding="utf-8") as file:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode) or not _is_private(status) or status.st_size > _MAX_BYTES:
                return None
            record = json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _folder(kind: str, *, make: bool = True) -> Path | None:
    root = _root()
    if root is None:
        return None
    folder = root / "lockstep" / kind
    for path in (root / "lockstep", folder):
        if make:
            path.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
        if not _is_private(path.lstat()) or not path.is_dir():
            return None
    return folder


def _root() -> Path | None:
    root = os.environ.get("XDG_STATE_HOME", "")
    if os.path.isabs(root):  # the specification ignores a relative one
        return Path(root)
    try:
        return Path.home() / ".local" / "state"
    except RuntimeError:
        return None


def _is_private(status: os.stat_result) -> bool:
    return status.st_uid == os.geteuid() and not status.st_mode & 0o022


def _write(path: Path, text: str) -> None:
    handle, partial = tempfile.mkstemp(dir=path.parent, prefix=".new-")  # 0600, under a random name
    try:
        with open(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(partial)
        raise
