"""The last words of a rank that has died by an abort or a crash: what C++ code has printed into its log, and the line.

    terminate called after throwing an instance of 'gloo::EnforceNotMet'
      what():  ... Received data size doesn't match expected size ...      --> the reason
    Fatal Python error: Aborted
      File "model.py", line 12 in forward                                  --> the line

Rank 0's own output of this kind is on the terminal, and not in its log.
"""

from __future__ import annotations

import os
import re
import signal
from dataclasses import replace
from pathlib import Path

from lockstep.core.files import opened_regular
from lockstep.core.secrets import shareable
from lockstep.launch.ends import End
from lockstep.launch.rank_stacks import line_of, main_frames

_DEATHS = (-signal.SIGABRT, -signal.SIGSEGV)
_MOST_BYTES, _MOST_CHARACTERS = 2**18, 300
_FATAL = "Fatal Python error: "
_REASON = re.compile(  # in a time that grows with the length of a line, not with its square
    r"^ *what\(\): +(?P<what>.+)$|^(?P<other>terminate called .+|libc\+\+abi: .+|(?>.*?Assertion ).* failed.*"
    r"|free\(\): .+|malloc\(\): .+|double free .+|corrupted .+|\*\*\* .+ \*\*\*.*)$",
    re.MULTILINE,
)
_MISMATCH = re.compile(r"data size doesn't match expected size|collective mismatch")


def with_last_words(end: End, log: Path, began: int) -> End:
    """Return the end of a rank with what its log states about its death; `began`: its size before the rank started."""
    if end.status not in _DEATHS:
        return end
    try:
        with opened_regular(log) as handle:
            size = os.fstat(handle).st_size
            start = max(began, size - _MOST_BYTES)
            text = os.pread(handle, max(0, size - start), start).decode("utf-8", "replace")
    except OSError:
        return end
    words = _words(text)
    return replace(end, text=f"{end.text}: {words}") if words else end


def _words(log: str) -> str:
    printed, fatal, stacks = log.rpartition(_FATAL) if _FATAL in log else (log, "", "")
    matches = [*_REASON.finditer(printed)]
    whats = [match["what"] for match in matches if match["what"]] or [match[0] for match in matches]
    reason = shareable(whats[-1].strip())[:_MOST_CHARACTERS] if whats else ""
    line = line_of(main_frames(stacks.partition("\n")[2])) if fatal else None
    mismatch = "the ranks called different collectives, or with tensors of different sizes"
    parts = [mismatch if _MISMATCH.search(reason) else "", f"at {line}" if line is not None else "", reason]
    return ", ".join(filter(None, parts))
