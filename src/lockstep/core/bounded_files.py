"""Reads small files whole, and no others: what somebody put in their place can be of any size, or have no end."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MOST_JSON = 2**24
"""Bytes of a file of JSON that Lockstep writes beside a run's data: nearly all have a few thousand."""


def read_bounded(path: Path, most: int) -> bytes:
    """The file's bytes. Raises OSError, also if it has more than `most` bytes or is no regular file."""
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:  # a pipe would keep its reader waiting
        facts = os.fstat(file.fileno())
        if stat.S_ISDIR(facts.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(facts.st_mode):
            raise OSError(errno.EINVAL, "it is not a file", str(path))
        if facts.st_size > most:
            raise OSError(errno.EFBIG, f"it has {facts.st_size:,} bytes, and may have {most:,}", str(path))
        return file.read(most)
