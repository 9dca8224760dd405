"""A run's folder while the run goes on: somebody may delete it, move it, or begin another run in its place.

RUN/run.lock   the file that is open    as it should be
               none, or another         deleted or moved: `recreate` writes what a start of the run writes
               locked by another run    taken: nothing is written there any more
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from lockstep.core.bounded_files import MOST_JSON, read_bounded
from lockstep.core.errors import RunFailed
from lockstep.core.open_files import is_behind, is_missing
from lockstep.monitor.folder import CONFIG, ENVIRONMENT, LOCK, LOGS, TENSORBOARD, open_lock, write_atomically


class RunFolderTaken(RunFailed):
    """The run's folder is another run's now."""


class LockedRunFolder:
    """A run's folder, on the first rank.

    Args:
        path: of the folder, which is there.
        run: id of the run.
    """

    def __init__(self, path: Path, run: str) -> None:
        self.path = path
        self._run = run
        self._files = {name: (path / name).read_text(encoding="utf-8") for name in (CONFIG, ENVIRONMENT)}
        self._locks = [os.open(path / LOCK, os.O_RDONLY | os.O_NOFOLLOW)]
        self._holder = os.read(self._locks[0], 1000)

    def is_complete(self) -> bool:
        """Whether it is there, with all that a start of the run writes. True as well where the disk doesn't say."""
        if not is_behind(self.path / LOCK, self._locks[-1]):
            return False
        return not any(is_missing(self.path / name) for name in (*self._files, LOGS))

    def moved_to(self) -> Path | None:
        """Where the folder is now, if it was moved; None: deleted, or nobody knows."""
        try:
            lock = Path(os.readlink(f"/proc/self/fd/{self._locks[-1]}"))
            found = lock.name == LOCK and is_behind(lock, self._locks[-1])
        except OSError:
            return None
        return lock.parent if found and lock.parent != self.path else None

    def recreate(self) -> None:
        """Writes what is missing.

        Raises:
            OSError: it can't be written.
            RunFolderTaken: it is another run's now.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        self._refuse_other_run()
        if not is_behind(self.path / LOCK, self._locks[-1]):
            self._locks.append(self._lock())
        for name in (TENSORBOARD, LOGS):
            (self.path / name).mkdir(exist_ok=True)
        for name, text in self._files.items():
            if is_missing(self.path / name):
                write_atomically(self.path / name, text)

    def close(self) -> None:
        for handle in self._locks:
            os.close(handle)

    def _refuse_other_run(self) -> None:
        try:
            other = json.loads(read_bounded(self.path / ENVIRONMENT, MOST_JSON)).get("run")
        except (OSError, ValueError, AttributeError, RecursionError):
            return
        if isinstance(other, str) and other != self._run:
            raise RunFolderTaken(f"{self.path} is the folder of another run now (run id {other[:8]})")

    def _lock(self) -> int:
        handle, holder = open_lock(self.path)
        if holder is not None and not any(is_behind(self.path / LOCK, ours) for ours in self._locks):
            os.close(handle)
            raise RunFolderTaken(f"{self.path} is the folder of another run now ({holder})")
        os.ftruncate(handle, 0)
        os.pwrite(handle, self._holder, 0)
        return handle
