"""The history of a run that resumes from a checkpoint: it ends where the checkpoint does, and lacks nothing before.

rewound to the step --> lines that a killed rank had not yet written --> checked --> without what will be repeated
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lockstep.core.errors import RunFailed
from lockstep.monitor import history, report_buffer
from lockstep.training.checkpoints import HISTORY
from lockstep.training.rescue import last_reports

if TYPE_CHECKING:
    from pathlib import Path

    from lockstep.monitor.folder import RunFolder
    from lockstep.training.checkpoints import Checkpoints


def rewind(folder: RunFolder, step: int, checkpoints: Checkpoints, memory: Path | None, every: int) -> list[str]:
    """Rewind the history to `step`, from which the run has resumed; return notes on what is missing. On the first rank.

    Args:
        memory: Folder of the buffer of reports; None: there is none.
        every: Steps between the lines of metrics.jsonl.

    Raises:
        RunFailed: A file of the history can't be written. What is in memory stays there for the next start.
    """
    saved = checkpoints.resumed_environment
    folder.rewind(step, memory)
    try:
        report_buffer.mend(folder.path, memory, step, every, last_reports(saved))
    except OSError as error:
        raise RunFailed(f"can't add to the history in {folder.path}: {error.strerror or error}") from error
    faults = history.faults(folder.path, saved.get(HISTORY))
    if checkpoints.evaluations.comes_first:
        folder.remove_evaluations(step)
    return faults
