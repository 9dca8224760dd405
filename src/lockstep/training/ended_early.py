"""A run that has ended early: whether a start trains it further, and what to change if not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from lockstep.core.files import MAX_JSON_BYTES, read_bounded
from lockstep.monitor.folder import SUMMARY

if TYPE_CHECKING:
    from pathlib import Path

    from lockstep.config.schema import Config


def continues_after_early_end(folder: Path, then: Config, now: Config) -> bool:
    """Return whether the run in the folder has ended early, and by another rule than the config's."""
    return bool(_reason(folder)) and then.monitor.early_stopping != now.monitor.early_stopping


def finished_message(folder: Path) -> str:
    """Return the message about a finished run that is started again as it was."""
    if reason := _reason(folder):
        return (
            f"the run in {folder} is finished: it ended early, since {reason}; to train it further, give it a longer "
            "run.steps (or epochs, ...), or raise monitor.early_stopping.patience if that ended it; --fresh starts over"
        )
    return f"the run in {folder} is finished; to resume, give it a longer run.steps (or epochs, ...), or --fresh"


def _reason(folder: Path) -> str:
    try:
        reason = json.loads(read_bounded(folder / SUMMARY, MAX_JSON_BYTES)).get("stopped_early")
    except (OSError, ValueError, AttributeError, RecursionError):
        return ""
    return reason if isinstance(reason, str) else ""
