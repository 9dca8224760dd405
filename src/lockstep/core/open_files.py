"""The limit on open files of this process."""

from __future__ import annotations

import contextlib
import resource

_OPEN_FILES = 65_536  # more than any run has; a limit of many millions makes other programs slow


def raise_open_file_limit() -> None:
    """Raise the soft limit, often 1,024, as far as the hard one allows.

    Data workers pass tensors as open files, and a relay has connections of all ranks.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, _OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):  # a sandbox may forbid it
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
