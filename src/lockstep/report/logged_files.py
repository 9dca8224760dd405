"""The images and tables that user code logged: which of them a page shows, and their bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep.core.files import read_bounded
from lockstep.monitor.media_folder import MEDIA
from lockstep.report.run_data import LoggedFile, RunData

MOST = 12
"""Images in a page at most, and tables."""
MOST_BYTES = 1 << 25
"""Bytes of a file at most, and of an image's pixels; a run logs at most 2,048 x 2,048 pixels."""


def newest_of_each(files: Sequence[LoggedFile]) -> list[LoggedFile]:
    """Return the last file of each name, in the order in which names first came, up to `MOST`."""
    return list({file.name: file for file in files}.values())[:MOST]


def content(run: RunData, file: LoggedFile) -> bytes:
    """Return the bytes of a file. Raises OSError, and ValueError for a link or one outside of the run's folder."""
    place = run.folder / file.file
    if place.is_symlink() or place.parent != run.folder / MEDIA:
        raise ValueError(f"{place} is not a file in {MEDIA}")
    return read_bounded(place, MOST_BYTES)


def remark(files: Sequence[LoggedFile], shown: Sequence[Any]) -> str:
    """Return where the other files are; empty if all are shown."""
    others = len(files) - len(shown)
    return f"The last of each name; {others:,} more {'is' if others == 1 else 'are'} in {MEDIA}/." if others else ""
