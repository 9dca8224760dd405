"""The last words of a rank that has died by an abort or a crash: what C++ code has printed into its log, and the line.

    terminate called after throwing an instance of 'gloo::EnforceNotMet'
      what():  ... Received data size doesn't match expected size ...      --> the reason
    Fatal Python error: Aborted
      File "model.py", line 12 in forward                                  --> the line

Rank 0's own output of this kind goes to standard error, past its log: it is read there if that is a file, as a batch
job's. A terminal or a pipe can't be read again.
"""

from __future__ import annotations

import os
import re
import signal
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from lockstep.core.files import opened_regular
from lockstep.core.secrets import shareable
from lockstep.launch.ends import End
from lockstep.launch.rank_stacks import line_of, main_frames
from lockstep.launch.streams import log_path

_DEATHS = (-signal.SIGABRT, -signal.SIGSEGV)
_MOST_BYTES, _MOST_CHARACTERS = 2**18, 300
_FATAL = "Fatal Python error: "
_REASON = re.compile(  # in a time that grows with the length of a line, not with its square
    r"^ *what\(\): +(?P<what>.+)$|^(?P<other>terminate called .+|libc\+\+abi: .+|(?>.*?Assertion ).* failed.*"
    r"|free\(\): .+|malloc\(\): .+|double free .+|corrupted .+|\*\*\* .+ \*\*\*.*)$",
    re.MULTILINE,
)
_MISMATCH = re.compile(r"data size doesn't match expected size|collective mismatch")


def with_last_words(end: End, logs: Path, rank: int, began: int) -> End:
    """Return the end of a rank with what its log states about its death.

    Args:
        began: Size of the log before the rank started.
    """
    if end.status not in _DEATHS:
        return end
    words = _words(_tail(log_path(logs, rank), began))
    return _with_words(end, words)


def _with_words(end: End, words: str) -> End:
    return replace(end, text=f"{end.text}: {words}") if words else end


def _words(log: str) -> str:
    printed, fatal, stacks = log.rpartition(_FATAL)
    if not fatal:
        printed = log
    matches = [*_REASON.finditer(printed)]
    whats = [match["what"] for match in matches if match["what"]]
    reason = shareable(next(reversed(whats or [match[0] for match in matches]), "").strip())
    line = line_of(main_frames(stacks.partition("\n")[2])) if fatal else None
    parts = [f"at {line}" if line is not None else "", reason[:_MOST_CHARACTERS]]
    if _MISMATCH.search(reason):
        parts.insert(0, "the ranks called different collectives, or with tensors of different sizes")
    return ", ".join(part for part in parts[:-1] if part) + (": " if any(parts[:-1]) and parts[-1] else "") + parts[-1]


def _tail(log: Path, began: int) -> str:
    """Return the end of what the rank has printed."""
    try:
        with opened_regular(log) as handle:
            return _end_of(handle, began)
    except OSError:
        return ""


def _end_of(handle: int, began: int) -> str:
    size = os.fstat(handle).st_size
    start = max(began, size - _MOST_BYTES)
    return os.pread(handle, max(0, size - start), start).decode("utf-8", "replace")


def size_of_stderr() -> int | None:
    """Return the bytes of the file that is standard error; None: it is a terminal, a pipe or closed."""
    with suppress(OSError):
        status = os.fstat(2)
        return status.st_size if stat.S_ISREG(status.st_mode) else None
    return None


def _printed_on_stderr(began: int) -> str:
    """Return the end of what was written to the file that is standard error, which may be open for writing alone."""
    try:
        handle = os.open("/proc/self/fd/2", os.O_RDONLY)
    except OSError:
        return ""
    try:
        return _end_of(handle, began)
    except OSError:
        return ""
    finally:
        os.close(handle)


def all_with_last_words(ends: Sequence[End], logs: Path, began: dict[int, int], stderr: int | None = None) -> list[End]:
    """Return the ends of all ranks, those of this host (`began`) with their last words.

    Args:
        stderr: What `size_of_stderr` was before they started.
    """
    described = [
        with_last_words(end, logs, rank, began[rank]) if rank in began else end for rank, end in enumerate(ends)
    ]
    if 0 in began and stderr is not None and described[0] is ends[0] and ends[0].status in _DEATHS:
        described[0] = _with_words(described[0], _words(_printed_on_stderr(stderr)))
    return described
