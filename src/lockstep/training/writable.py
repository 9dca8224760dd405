"""Finds out whether the folders of a run can be written, before its ranks start again: a disk may be gone or full.

rank 1 is killed, and the disk is read-only --> waited for --> the ranks start: attempts.jsonl, history, ...
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.checkpoint.local import LocalStorage
from lockstep.checkpoint.patience import may_pass
from lockstep.core.errors import Failure
from lockstep.training.locations import storage_of

if TYPE_CHECKING:
    from lockstep.training.job import Job

_BYTES = 2**16  # about what a start writes


def why_unwritable(job: Job, run: Path) -> str:
    """Return why the run's folder, or that of its checkpoints, can't be written and may be soon; empty: they can."""
    try:
        storage = storage_of(job.config.checkpoint, run, job.given.storage)
    except (Failure, OSError):  # which the ranks report
        storage = None
    folders = [run, *([Path(storage.place)] if isinstance(storage, LocalStorage) else [])]
    for folder in folders:
        try:
            with tempfile.TemporaryFile(dir=folder, buffering=0) as file:
                file.write(bytes(_BYTES))
        except OSError as error:
            if may_pass(error):
                return f"{folder}: {os.strerror(error.errno or 0)}"
    return ""
