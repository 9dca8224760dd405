"""Looks after a run's folder while the run goes on, beside the training.

every half second    run folder, checkpoints, open files: still there?
  deleted, moved     reported once --> made again, with what is known of the run --> saved after the update under way
  another run's      reported once --> nothing is written there any more; the run fails at its end
  can't be made      reported once --> tried again each time; the last save tells whether the run fails
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from lockstep.launch import streams
from lockstep.monitor.folder import LockedRunFolder, RunFolderTaken

if TYPE_CHECKING:
    from lockstep.monitor.history import HistoryFiles
    from lockstep.training.checkpoints import Checkpoints

_log = logging.getLogger("lockstep")
_SECONDS_BETWEEN_LOOKS = 0.5
_ONE_DELETION_S = 10.0  # what goes on being deleted is made again without another word


class FolderWatch:
    """On the first rank. Its methods may be called in any thread."""

    def __init__(self, folder: LockedRunFolder, checkpoints: Checkpoints, history: HistoryFiles) -> None:
        self._folder = folder
        self._checkpoints = checkpoints
        self._history = history
        self._lock = threading.Lock()
        self._taken: RunFolderTaken | None = None
        self._reported_at = -_ONE_DELETION_S
        self._failed = False

    def look(self) -> None:
        """Makes again what is missing. Never raises."""
        with self._lock:
            if self._taken is not None:
                return
            lost = self._lost()
            try:
                if lost is not None:
                    self._folder.recreate()
                    self._checkpoints.make_again()
                self._history.reopen()
                streams.reopen()
            except RunFolderTaken as error:
                self._taken = error
                _log.warning("%s; this run writes nothing there any more, and fails at its end", error)
            except OSError as error:
                self._report_failure(lost or "files in the run's folder were deleted", error)
            else:
                self._failed = False
                if lost is not None:
                    self._report(lost)

    def refuse_taken(self) -> None:
        """Raises RunFolderTaken: the folder is another run's now."""
        self.look()
        if self._taken is not None:
            raise self._taken

    def close(self) -> None:
        with self._lock:
            self._taken = RunFolderTaken("the run has ended")
            self._folder.close()

    def _lost(self) -> str | None:
        """What is missing; None if nothing is."""
        if not self._folder.is_complete():
            where = self._folder.moved_to()
            if where is None:
                return f"the run folder {self._folder.path}, or a part of it, was deleted while the run goes on"
            return f"the run folder {self._folder.path} was moved to {where} while the run goes on"
        if not self._checkpoints.are_there():
            return f"checkpoints in {self._checkpoints.place} were deleted while the run goes on"
        return None

    def _report(self, lost: str) -> None:
        now = time.monotonic()
        if now - self._reported_at > _ONE_DELETION_S:
            _log.warning("%s; what is known of the run is written there again, and its state saved at once", lost)
        self._reported_at = now

    def _report_failure(self, lost: str, error: OSError) -> None:
        if self._failed:
            return
        self._failed = True
        reason = f"{error.strerror or error}{f': {error.filename}' if error.filename else ''}"
        _log.warning("%s, and can't be written again: %s; the run goes on, and tries it until its end", lost, reason)


@contextmanager
def looking(look: Callable[[], None]) -> Iterator[None]:
    """Calls `look` in a thread, every half second while the block runs."""
    ended = threading.Event()

    def keep_looking() -> None:
        while not ended.wait(_SECONDS_BETWEEN_LOOKS):
            look()

    thread = threading.Thread(target=keep_looking, name="folder-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(_SECONDS_BETWEEN_LOOKS)  # a disk that hangs may hold it for ever
