"""A row of the catalog of failures: how one shows in a log, its cause, and what to do.

What Lockstep itself has ended is recorded with its kind. Patterns are matched against single lines that torch, drivers,
the kernel or other programs have written to logs. A failure that explains others has a lower standing:

    CAUSE          a fact about one host or program         port taken, out of memory
    SYMPTOM        what a cause leads to on that rank       a traceback, an error of NCCL
    CONSEQUENCE    what other ranks see of it               a timeout, a connection that was closed
    REMARK         not by itself the end of a run           a discarded update, a slow rank
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum

from lockstep.core.failure_kinds import FailureKind


class Standing(IntEnum):
    """The place of a failure among others that were seen, the one to read first lowest."""

    CAUSE = 0
    SYMPTOM = 1
    CONSEQUENCE = 2
    REMARK = 3


_STANDINGS = {
    FailureKind.EXCEPTION: Standing.SYMPTOM, FailureKind.EXITED: Standing.SYMPTOM,
    FailureKind.DEVICE: Standing.SYMPTOM, FailureKind.PEER_FAILED: Standing.CONSEQUENCE,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class KnownFailure:
    """A row of the catalog.

    Attributes:
        name: A few words that name it.
        pattern: Matches a line, of another program's, that shows it; None: no line does.
        cause: Why it happens, in a sentence.
        remedy: What to do, in the imperative.
        file: The name of the file in which it shows; empty: the ranks' logs.
    """

    name: str
    pattern: re.Pattern[str] | None
    cause: str
    remedy: str
    standing: Standing = Standing.CAUSE
    file: str = ""


def row(
    name: str, pattern: str, cause: str, remedy: str, standing: Standing = Standing.CAUSE, file: str = ""
) -> KnownFailure:
    """Return a row, with a regular expression."""
    return KnownFailure(name, re.compile(pattern), cause, remedy, standing, file)


def row_of(kind: FailureKind, pattern: str = "") -> KnownFailure:
    """Return the row of a kind of failures, which Lockstep itself records; the pattern is for other programs' lines."""
    standing = _STANDINGS.get(kind, Standing.CAUSE)
    return KnownFailure(kind.title, re.compile(pattern) if pattern else None, kind.cause, kind.remedy, standing)
