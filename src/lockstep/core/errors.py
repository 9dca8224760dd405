"""Errors that users can act on; each carries its kind (`failure_kinds`), and so the exit code of its process."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from lockstep.core.failure_kinds import FailureKind
from lockstep.core.terminal import plain, plain_line

_MOST_NAMED = 8  # ranks in a sentence
# Messages of gloo, NCCL and torch's store about the other side of a connection.
_PEER_WENT_AWAY = re.compile(
    r"gloo/transport/|Connection (closed|reset) by|Broken pipe|Socket closed|recvValue failed|sendBytes failed"
    r"|NCCL communicator was aborted|ncclRemoteError|remote process exited|failed to recv, got 0 bytes",
    re.IGNORECASE,
)


class Failure(Exception):
    """An error that a user can act on; the command line prints it without a traceback."""

    kind: FailureKind = FailureKind.FAILED
    exit_code = FailureKind.FAILED.exit_code

    def __init_subclass__(cls) -> None:
        cls.exit_code = cls.kind.exit_code

    def __init__(self, *args: object, kind: FailureKind | None = None) -> None:
        super().__init__(*args)
        if kind is not None:
            self.kind, self.exit_code = kind, kind.exit_code

    def __str__(self) -> str:
        return plain(super().__str__())


class RunFailed(Failure):
    """The run failed, and trying again would not help."""


class SampleFailure(RunFailed):
    """Reading samples ended the run.

    Attributes:
        samples: The one that was read, or several candidates; empty if unknown.
        evaluation_set: None: the training data.
    """

    def __init__(
        self,
        message: str,
        samples: Sequence[int] = (),
        evaluation_set: str | None = None,
        kind: FailureKind | None = None,
    ) -> None:
        super().__init__(message, kind=kind)
        self.samples, self.evaluation_set = tuple(samples), evaluation_set


class UnusableSamples(SampleFailure):
    """Samples can't be read, or not be put into one batch."""

    kind = FailureKind.SAMPLE


class WorkerDied(SampleFailure):
    """A data worker died."""

    kind = FailureKind.WORKER_DIED


class OutOfMemory(RunFailed):
    """Memory ran out, on a rank's device or on its machine.

    Attributes:
        advice: The end of the message: what to change.
        too_large: Sizes of micro-batches, by their keys, where smaller ones may fit.
    """

    kind = FailureKind.OUT_OF_MEMORY

    def __init__(self, message: str, advice: str = "", too_large: Mapping[str, int] | None = None) -> None:
        super().__init__(f"{message} {advice}" if advice else message)
        self.advice = advice
        self.too_large = dict(too_large or {})


class CollectiveTimeout(RunFailed):
    """Other ranks did not reach a collective in time: the cause is there."""

    kind = FailureKind.TIMED_OUT


class ReplicasDiffer(RunFailed):
    """Ranks hold different copies of the same state: nothing since its checkpoint is to be trusted.

    Attributes:
        ranks: Those that differ from the majority; empty: there is none.
    """

    kind = FailureKind.DIVERGED

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


class RolledBack(RunFailed):
    """The run goes back to an earlier state and leaves samples out: it is to be started again."""

    kind = FailureKind.ROLLED_BACK


class PeerFailed(RunFailed):
    """Another rank failed and reports why."""

    kind = FailureKind.PEER_FAILED


class VerificationError(Failure):
    """A verification found a fault."""

    kind = FailureKind.WRONG


class Stopped(Failure):
    """A person or a scheduler stopped the run."""

    kind = FailureKind.STOPPED


class Paused(Stopped):
    """Stopped as requested, with its state saved: the same command resumes it."""

    kind = FailureKind.PAUSED


@dataclass(frozen=True, slots=True)
class Problem:
    """A mistake in a config.

    Attributes:
        where: `file:line:column`, a flag, or an environment variable; empty if there is no single origin.
        key: Dotted key, such as `optim.lr`.
    """

    where: str
    key: str
    message: str

    def __str__(self) -> str:
        key = "" if self.where == f"--{self.key}" else self.key
        place = plain_line(": ".join(part for part in (self.where, key) if part))
        return plain(f"{place}: {self.message}" if place else self.message)


class ConfigError(Failure):
    """A config that can't be run, with all its problems."""

    kind = FailureKind.CONFIG

    def __init__(self, problems: Sequence[Problem] | Problem | str, kind: FailureKind | None = None) -> None:
        if isinstance(problems, str):
            problems = Problem("", "", problems)
        self.problems: tuple[Problem, ...] = (problems,) if isinstance(problems, Problem) else tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems), kind=kind)

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...], FailureKind]]:
        return type(self), (self.problems, self.kind)


def refuse(problems: Iterable[Problem]) -> None:
    """Raise ConfigError with all of these problems, if there are any."""
    if all_problems := tuple(problems):
        raise ConfigError(all_problems)


def named_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as text, the first of many: `ranks 1, 2 and 5`."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > _MOST_NAMED:
        return f"ranks {', '.join(map(str, ranks[:_MOST_NAMED]))} and {len(ranks) - _MOST_NAMED} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def timeout_message(missing: str, waiting: str, seconds: float) -> str:
    """Return the message about `missing` ranks that kept `waiting` ranks waiting in a collective."""
    return (
        f"{missing} did not answer within {seconds:g} s (launch.timeout), while {waiting} waited in a collective. If a "
        "rank hangs, start again and see where (py-spy dump, a debugger); if it is only slow (a data source, a "
        "compilation), raise launch.timeout"
    )


class Rescued(str):
    """A note on an exception about what was saved of the run."""

    __slots__ = ()


def message_of(failure: BaseException) -> str:
    """Return the failure's message, with what was saved of the run."""
    notes = [note for error in causes(failure) for note in getattr(error, "__notes__", ()) if isinstance(note, Rescued)]
    return "\n".join([str(failure), *notes])


def blames_a_peer(error: BaseException | None) -> bool:
    """Return whether the error or a cause of it is about another rank or a broken connection."""
    return any(
        isinstance(link, PeerFailed)
        or (isinstance(link, RuntimeError | OSError) and _PEER_WENT_AWAY.search(str(link)) is not None)
        for link in causes(error)
    )


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and those it was raised from, the last first."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__


_reporters: list[Callable[[BaseException], None]] = []
"""The functions of the runs that this process is in. Process-wide: who reports and who fails don't know each other."""


@contextmanager
def reports_failures(report: Callable[[BaseException], None]) -> Iterator[None]:
    """Have `report_failure` call `report` while the block runs."""
    _reporters.append(report)
    try:
        yield
    finally:
        _reporters.remove(report)


def report_failure(error: BaseException) -> bool:
    """Report an exception before connections are closed, which may hang; return whether it was."""
    for report in _reporters:
        report(error)
    return bool(_reporters)
