"""Faults of the disk and of the data that are planted in a rank: saves meet a disk that is full, gone, slow or changed.

full        a write to an unfinished checkpoint fails with ENOSPC, once
readonly    whatever changes one fails with EROFS, for 0.5 s
gone        whatever uses one fails with EIO, for 0.5 s
slow        writes to one take 0.1 s longer, twenty times
sample      a read of samples raises, once
flip        a byte of the newest checkpoint is changed, and all ranks are killed
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

DISK_KINDS = ("full", "readonly", "gone", "slow")
SAMPLE, FLIP = "sample", "flip"
_DRAFT, _PUBLISHED = "/.draft-", "step-*/*.safetensors"
_MEMORY = "/dev/shm/lockstep-"  # where snapshots are
_LASTS_S = {"full": 0.0, "readonly": 0.5, "gone": 0.5}
_ERRORS = {"full": errno.ENOSPC, "readonly": errno.EROFS, "gone": errno.EIO}
_SLOW_S, _SLOW_CALLS = 0.1, 20


def newest_of_two(folder: Path) -> Path | None:
    """Return the largest file of the newest checkpoint, as small ones may not be read; None if it is the only one."""
    files = sorted(folder.glob(_PUBLISHED))
    newest = [file for file in files if file.parent == files[-1].parent]
    return max(newest, key=lambda file: file.stat().st_size) if len(newest) < len(files) else None


def flip_byte(file: Path) -> None:
    """Change a byte in the middle of a file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def plant_in_disk(kind: str, hit: Callable[[], None]) -> None:
    """Make the disk below unfinished checkpoints fail for a while; `hit` is called with the first failure."""
    fault = _DiskFault(kind, hit)
    changing = ("open", "mkdir", "rename")
    names = {"full": ("write",), "slow": ("write",), "readonly": changing, "gone": (*changing, "write")}
    fault.follow_handles()
    for name in names[kind]:
        fault.wrap(name)


class _DiskFault:
    def __init__(self, kind: str, hit: Callable[[], None]) -> None:
        self._kind = kind
        self._hit = hit
        self._began: float | None = None
        self._calls = 0
        self._drafts: set[int] = set()

    def follow_handles(self) -> None:
        """Remember which handles are of files of unfinished checkpoints."""
        opened = os.open

        def opening(path: Any, *how: Any, **more: Any) -> int:
            handle = opened(path, *how, **more)
            (self._drafts.add if _is_draft(path) else self._drafts.discard)(handle)
            return handle

        os.open = opening

    def wrap(self, name: str) -> None:
        """Let a function of `os` fail."""
        function = getattr(os, name)

        def failing(target: Any, *rest: Any, **more: Any) -> Any:
            if target in self._drafts if isinstance(target, int) else _is_draft(target):
                self._meet()
            return function(target, *rest, **more)

        setattr(os, name, failing)

    def _meet(self) -> None:
        now, is_first = time.monotonic(), self._began is None
        if self._began is None:
            self._began = now
            self._hit()
        if self._kind == "slow":
            self._calls += 1
            time.sleep(_SLOW_S if self._calls <= _SLOW_CALLS else 0.0)
        elif is_first or now - self._began < _LASTS_S[self._kind]:
            number = _ERRORS[self._kind]
            raise OSError(number, os.strerror(number))


def _is_draft(path: Any) -> bool:
    if not isinstance(path, str | os.PathLike):
        return False
    text = os.fspath(path)
    return _DRAFT in text and not text.startswith(_MEMORY)
