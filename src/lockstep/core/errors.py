"""Failures, named by what happens next, each with the exit code that says so to whoever started the process.

0    done
1    failed            GiveUp: nothing automatic helps; read the message
2    fix your config   ConfigError: no process was started, no work was lost
3    distrust it       Distrust: what was asked to be verified is not right
75   start it again    Paused: stopped as asked, all is saved
130  stopped           Stopped: somebody asked for it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lockstep.core.terminal import plain, plain_line


class Failure(Exception):
    """Something a user can read and act on; the command line prints it without a traceback."""

    exit_code = 1

    def __str__(self) -> str:
        return plain(super().__str__())


class GiveUp(Failure):
    """The run can't go on, and trying again would not help."""


class OutOfMemory(GiveUp):
    """Memory ran out, of a rank's device or of its machine."""


class Waited(GiveUp):
    """Other ranks didn't come to a collective in time: what failed is with them, and they may say nothing of it."""


class OtherRankFailed(GiveUp):
    """Another rank failed, and says why; nothing is wrong with this one."""


class Distrust(Failure):
    """What was asked to be verified is not right: don't build on it."""

    exit_code = 3


class Stopped(Failure):
    """A person or a scheduler asked the run to stop."""

    exit_code = 130


class Paused(Stopped):
    """Stopped as asked, with all that was learned saved: the same command goes on from here."""

    exit_code = 75  # EX_TEMPFAIL: schedulers know it as "start it again"


@dataclass(frozen=True, slots=True)
class Problem:
    """One thing wrong in a config.

    Attributes:
        where: file:line:column, a flag, or an environment variable; empty if the value came from no one place.
        key: dotted key, such as `optim.lr`.
        message: what is wrong, why, and the nearest right value.
    """

    where: str
    key: str
    message: str

    def __str__(self) -> str:
        key = "" if self.where == f"--{self.key}" else self.key
        place = plain_line(": ".join(part for part in (self.where, key) if part))
        return plain(f"{place}: {self.message}" if place else self.message)


class ConfigError(Failure):
    """What was asked can't be done as asked. Holds all problems at once."""

    exit_code = 2

    def __init__(self, problems: Sequence[Problem] | Problem | str) -> None:
        if isinstance(problems, str):
            problems = Problem("", "", problems)
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)


def not_answered(missing: str, waiting: str, seconds: float) -> str:
    """What people read when `missing` have let `waiting` wait."""
    return (
        f"{missing} did not answer within {seconds:g} s (launch.timeout), while {waiting} waited in a collective. If a "
        "rank hangs, start again and see where (py-spy dump, a debugger); if it is only slow (a data source, a "
        "compilation), raise launch.timeout"
    )


class Rescued(str):
    """A note on an exception that states what was saved of the run that it ended, or why nothing was."""

    __slots__ = ()


def message_of(failure: BaseException) -> str:
    """Return the failure's message, with what was saved of the run."""
    notes: list[str] = []
    link: BaseException | None = failure
    while link is not None:
        notes += [note for note in getattr(link, "__notes__", ()) if isinstance(note, Rescued)]
        link = link.__cause__
    return "\n".join([str(failure), *notes])
