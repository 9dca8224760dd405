"""Restores a run's folder that is deleted during the training, in a thread of the first rank.

every half second    run folder, checkpoints, open files: still there?
  deleted, moved     reported once --> written again --> the state is saved after the current update
  another run's      reported once --> nothing is written there anymore; the run fails at its end
  can't be written   reported once --> tried again each time; the last save decides whether the run fails
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lockstep.monitor.folder import LockedRunFolder, RunFolderTaken

if TYPE_CHECKING:
    from lockstep.monitor.history import HistoryFiles
    from lockstep.training.checkpoints import Checkpoints

_log = logging.getLogger("lockstep")
_SECONDS_BETWEEN_LOOKS = 0.5


class FolderWatch:
    """Watches the folder on the first rank. Its methods may be called in any thread."""

    def __init__(self, folder: LockedRunFolder, checkpoints: Checkpoints, history: HistoryFiles) -> None:
        self._folder = folder
        self._checkpoints = checkpoints
        self._history = history
        self._lock = threading.Lock()
        self._taken: RunFolderTaken | None = None
        self._failed = False

    def look(self) -> None:
        """Restore what is missing. Never raises."""
        with self._lock:
            if self._taken is not None:
                return
            lost = self._lost()
            try:
                if lost is not None:
                    self._folder.recreate()
                    self._checkpoints.reclaim()
                self._history.reopen()
            except RunFolderTaken as error:
                self._taken = error
                _log.warning("%s; this run writes nothing there anymore, and fails at its end", error)
            except OSError as error:
                self._report_failure(lost or "files in the run's folder were deleted", error)
            else:
                self._failed = False
                if lost is not None:
                    _log.warning("%s; the files are written there again, and the state is saved now", lost)

    def refuse_taken(self) -> None:
        """Raise RunFolderTaken if the folder is another run's now."""
        self.look()
        if self._taken is not None:
            raise self._taken

    def close(self) -> None:
        with self._lock:
            self._taken = RunFolderTaken("the run has ended")
            self._folder.close()

    def _lost(self) -> str | None:
        """Return what is missing, for messages; None if nothing is."""
        if not self._folder.is_complete():
            return f"the run folder {self._folder.path}, or a part of it, was deleted or moved during the run"
        if not self._checkpoints.exist():
            return f"checkpoints in {self._checkpoints.place} were deleted during the run"
        return None

    def _report_failure(self, lost: str, error: OSError) -> None:
        if self._failed:
            return
        self._failed = True
        reason = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
        _log.warning("%s, and can't be written again: %s; the run continues, and retries until its end", lost, reason)


@contextmanager
def polling(look: Callable[[], None]) -> Iterator[None]:
    """Call `look` in a thread, every half second while the block runs."""
    ended = threading.Event()

    def poll() -> None:
        while not ended.wait(_SECONDS_BETWEEN_LOOKS):
            look()

    thread = threading.Thread(target=poll, name="folder-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_SECONDS_BETWEEN_LOOKS)  # a disk that hangs may block it forever
