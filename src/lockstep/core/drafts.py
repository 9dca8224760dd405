"""Names of drafts: files and folders that several processes may write, each its own, and rename when complete.

NAME                 complete
NAME@HOST@PID.part   a draft; deleted by the next process that writes NAME, if its writer has ended
"""

from __future__ import annotations

import glob
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from lockstep.core.files import changed, flush

_ABANDONED_S = 3600.0


def draft_of(path: Path) -> Path:
    """Return the name of this process's draft of a file or folder."""
    return path.with_name(f"{path.name}@{socket.gethostname()}@{os.getpid()}.part")


@contextmanager
def whole_folder(entry: Path) -> Iterator[Path]:
    """Yield a draft of a folder to write to; then it has its name, unless another process was first. Raises OSError."""
    remove_abandoned(entry)
    draft = draft_of(entry)
    draft.mkdir()
    try:
        yield draft
        for path in (*draft.iterdir(), draft):
            flush(path)
        try:
            draft.rename(entry)
        except OSError:
            if not entry.is_dir():  # on a file system without locks, another process may be first
                raise
        flush(entry.parent)
    finally:
        remove(draft)


def remove_abandoned(path: Path) -> None:
    """Delete the drafts of a file or folder whose writers have ended, as far as that is possible."""
    for draft in path.parent.glob(f"{glob.escape(path.name)}@*.part"):
        if _is_abandoned(draft):
            remove(draft)


def remove(draft: Path) -> None:
    """Delete a draft, if it is there, as far as that is possible."""
    if draft.is_dir():
        shutil.rmtree(draft, ignore_errors=True)
    else:
        with suppress(OSError):
            draft.unlink()


def _is_abandoned(draft: Path) -> bool:
    """Return whether a draft's writer has ended; one on another machine, if nothing was written for a while."""
    _, host, number = draft.stem.rsplit("@", 2)
    if host == socket.gethostname() and number.isdecimal():
        return int(number) == os.getpid() or not _is_running(int(number))
    written = changed(*draft.iterdir()) if draft.is_dir() else changed(draft)
    return 0 < written < time.time() - _ABANDONED_S


def _is_running(process: int) -> bool:
    import psutil

    try:
        return psutil.Process(process).status() != psutil.STATUS_ZOMBIE  # killed, and its parent doesn't know it yet
    except psutil.NoSuchProcess:
        return False
    except psutil.Error:
        return True
