"""A row of the catalog of failures: how one shows in a log, its cause, and what to do.

Patterns are matched against single lines of logs. A failure that explains others has a lower standing:

    CAUSE          a fact about one host or program         port taken, out of memory
    SYMPTOM        what a cause leads to on that rank       a traceback, an error of NCCL
    CONSEQUENCE    what other ranks see of it               a timeout, a connection that was closed
    REMARK         not by itself the end of a run           a discarded update, a slow rank
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum


class Standing(IntEnum):
    """The place of a failure among others that were seen, the one to read first lowest."""

    CAUSE = 0
    SYMPTOM = 1
    CONSEQUENCE = 2
    REMARK = 3


@dataclass(frozen=True, slots=True)
class KnownFailure:
    """A row of the catalog.

    Attributes:
        name: A few words that name it.
        pattern: Matches a line that shows it.
        cause: Why it happens, in a sentence.
        remedy: What to do, in the imperative.
        file: The name of the file in which it shows; empty: the ranks' logs.
    """

    name: str
    pattern: re.Pattern[str]
    cause: str
    remedy: str
    standing: Standing = Standing.CAUSE
    file: str = ""

    def sample_in(self, line: str) -> str:
        """Return the number of the sample that a line is about; empty if it names none, or several."""
        match = self.pattern.search(line) if "sample" in self.pattern.groupindex else None
        return (match["sample"] or "") if match else ""


def row(
    name: str, pattern: str, cause: str, remedy: str, standing: Standing = Standing.CAUSE, file: str = ""
) -> KnownFailure:
    """Return a row, whose pattern is a regular expression."""
    return KnownFailure(name, re.compile(pattern), cause, remedy, standing, file)
