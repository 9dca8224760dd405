"""Reads from the kernel's log, where this user may, which processes it has killed because memory ran out.

6,5239,66960388172,-;Out of memory: Killed process 4410 (python) ...     microseconds since the start of this machine
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

_LINE = re.compile(r"\d+,(\d+),(\d+),[^;]*;(.*)")
_KILLED = re.compile(r"Killed process \d+|oom-kill:")
_NEAR_S = 5.0  # between a line and the moment at which the launcher noticed that the rank had ended
_MOST_LINES = 200_000


def kernel_kills_near(moments: Sequence[float], log: Path = Path("/dev/kmsg")) -> list[tuple[int, str]]:
    """Return number and text of this host's lines about processes that it killed at these times, seconds of the epoch.

    Nothing is returned if the log can't be read, or has forgotten that time.
    """
    started = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
    lines = []
    for text in _read(log) if moments else ():
        match = _LINE.match(text)
        if match is None or not _KILLED.search(match[3]):
            continue
        moment = started + int(match[2]) / 1e6
        if any(abs(moment - ended) < _NEAR_S for ended in moments):
            lines.append((int(match[1]), match[3]))
    return lines


def _read(log: Path) -> list[str]:
    """Return the log's lines; each read returns one."""
    lines: list[str] = []
    with suppress(OSError):
        handle = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
        try:
            while len(lines) < _MOST_LINES and (data := os.read(handle, 1 << 16)):
                lines += data.decode("utf-8", "replace").splitlines()
        finally:
            os.close(handle)
    return lines
