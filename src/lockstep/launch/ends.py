"""How ranks ended, and which of them failed first.

    rank 0   ......................raises "connection closed by peer"     a consequence, though reported first
    rank 1   ....killed by SIGKILL                                        the cause
    rank 2   ............................................ended            by the launcher: nothing to report

A rank that fails breaks its peers' collectives, and their errors may be reported before its own. So causes are ordered
by kind (errors that a peer's failure explains come last), then by time.

    rank 0   ..............collective timed out     also a consequence: `launch.timeout` is over
    rank 1   .......................ended           the cause, without a report

A rank that hangs reports nothing. It is identified by the others' reports: they have waited, and it hasn't.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import Enum
from time import monotonic
from types import TracebackType
from typing import Any

from lockstep.core.errors import (
    CollectiveTimeout,
    ConfigError,
    Failure,
    OutOfMemory,
    Paused,
    PeerFailed,
    Problem,
    ReplicasDiffer,
    RolledBack,
    RunFailed,
    Stopped,
    WorkerDied,
    blames_a_peer,
    message_of,
    named_ranks,
    timeout_message,
)
from lockstep.core.formatting import listed
from lockstep.core.heartbeat import Reading
from lockstep.core.stopping import STOP_SIGNALS


class EndKind(Enum):
    """The kinds of a rank's end."""

    DONE = "returned 0"
    MESSAGE = "raised a Failure, whose message is shown without a traceback"
    TRACEBACK = "raised another exception"
    CODE = "returned another code, which Lockstep has chosen"
    EXITED = "called sys.exit() or os._exit() before it was done"
    KILLED = "was killed by a signal"
    STOPPED = "was stopped by another process than the launcher"
    INTERRUPTED = "was killed by a stop signal: nothing was trained"
    PAUSED = "was stopped, and all is saved"
    TIMED_OUT = "waited in a collective that not all ranks reached"
    HUNG = "hung, and was killed by the launcher"
    PEER_FAILED = "failed with an error that a peer's failure explains"
    DIVERGED = "holds another copy of the training state than other ranks"
    ROLLED_BACK = "goes back to an earlier state, because of bad numbers"
    LOST = "was on a host that can't be reached any more"
    ENDED = "was stopped or killed by the launcher"


_WEIGHT = {EndKind.PAUSED: 1, EndKind.TIMED_OUT: 2, EndKind.PEER_FAILED: 3, EndKind.ENDED: 4}
"""An end is explained by any end of a lower weight; all other kinds have 0."""

_LATE = 2.0  # seconds after the first timeout: a rank that then finds the group broken was not waiting
_NOTICE_DELAY = 0.5  # seconds by which a rank's death by a signal may be noticed after its consequences
_MOST_HOSTS = 4  # in a message
_MOST_CHARACTERS = 12_000  # of a report, so that it reaches the launcher in one piece


@dataclass(frozen=True, slots=True)
class End:
    """The end of a rank.

    Attributes:
        code: The exit code of the run, if this end is its cause.
        text: A message, a traceback, or a sentence to show.
        time: When the rank raised, returned or was found dead, in seconds (CLOCK_MONOTONIC, the same in all processes).
        detail: A traceback for the rank's log; empty if `text` has it, or if there is none.
        problems: The problems of a ConfigError.
        advice: That of an OutOfMemory, which `text` contains.
        too_large: Sizes with which memory has run out; see OutOfMemory.
        samples: The one whose reading has ended it, or several, one of which has.
        evaluation_set: The evaluation set that they are of; None: the training data.
        reading: What it was reading, if `text` doesn't state it.
        differing: The ranks whose copies of the training state differ from most ranks'.
        status: The exit code of the rank's process, if it has exited by itself without a report.
        evaluates: Whether it has ended in an evaluation, without a report.
        worker_was_killed, worker_has_exited: How a data worker has died, which ended the rank.
    """

    kind: EndKind
    code: int
    text: str
    time: float
    detail: str = ""
    problems: tuple[Problem, ...] = ()
    advice: str = ""
    too_large: Mapping[str, int] = field(default_factory=dict)
    samples: tuple[int, ...] = ()
    evaluation_set: str | None = None
    reading: str = ""
    differing: tuple[int, ...] = ()
    status: int | None = None
    evaluates: bool = False
    worker_was_killed: bool = False
    worker_has_exited: bool = False


def end_fields(end: End) -> dict[str, Any]:
    """Return an end for a message to another host, whose clock is another one."""
    return {**asdict(end), "kind": end.kind.name, "age": monotonic() - end.time}


def end_of_fields(fields: Mapping[str, Any]) -> End:
    """Return the end that a message states."""
    known = {name: value for name, value in fields.items() if name != "age"}
    problems = tuple(Problem(**problem) for problem in known["problems"])
    changed = {"kind": EndKind[known["kind"]], "time": monotonic() - fields["age"], "problems": problems}
    tuples = {name: tuple(known[name]) for name in ("samples", "differing")}
    return End(**{**known, **changed, **tuples})


def end_of_return(code: int, time: float) -> End:
    """Return the end of an entry that returned, or of a process that exited with `code` and no report."""
    kinds = {0: EndKind.DONE, Stopped.exit_code: EndKind.STOPPED, Paused.exit_code: EndKind.PAUSED}
    if code in kinds:
        return End(kinds[code], code, "", time)
    return End(EndKind.CODE, code, f"ended with exit code {code}", time)


def end_of_exception(error: BaseException, time: float, frames: TracebackType | None) -> End:
    """Return the end of an entry that raised. `frames` are those to show."""
    match error:
        case Paused():
            return End(EndKind.PAUSED, Paused.exit_code, str(error), time)
        case KeyboardInterrupt():
            saved = message_of(error).removeprefix(str(error))
            text = f"interrupted by a KeyboardInterrupt{_raised_in(error)}{saved}"
            return End(EndKind.STOPPED, Stopped.exit_code, text, time)
        case Stopped():
            return End(EndKind.STOPPED, Stopped.exit_code, message_of(error).strip(), time)
        case CollectiveTimeout():
            return End(EndKind.TIMED_OUT, error.exit_code, message_of(error), time)
        case ReplicasDiffer():
            return End(EndKind.DIVERGED, error.exit_code, message_of(error), time, differing=error.ranks)
        case RolledBack():
            return End(EndKind.ROLLED_BACK, error.exit_code, message_of(error), time)
        case PeerFailed():
            return End(EndKind.PEER_FAILED, error.exit_code, message_of(error), time)
        case Failure():
            cause = error.__cause__
            detail = "" if cause is None else "".join(traceback.format_exception(cause)).rstrip()
            problems = error.problems if isinstance(error, ConfigError) else ()
            text = message_of(error)
            if isinstance(error, OutOfMemory):
                return End(EndKind.MESSAGE, error.exit_code, text, time, detail, (), error.advice, error.too_large)
            end = End(EndKind.MESSAGE, error.exit_code, text, time, detail, problems)
            if isinstance(error, WorkerDied):
                end = replace(end, samples=error.samples, evaluation_set=error.evaluation_set)
                return replace(end, worker_was_killed=error.was_killed, worker_has_exited=error.has_exited)
            return end
        case SystemExit(code=int() | None):
            saved = message_of(error).removeprefix(str(error))
            text = f"called sys.exit({int(error.code or 0)}){_raised_in(error)}{saved}"
            return End(EndKind.EXITED, RunFailed.exit_code, text, time)
        case SystemExit():
            return End(EndKind.MESSAGE, 1, message_of(error), time)
    text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    half = _MOST_CHARACTERS // 2
    if len(text) > _MOST_CHARACTERS:  # a traceback's beginning and end matter
        text = f"{text[:half]}\n  ... {len(text) - 2 * half} characters ...\n{text[-half:]}"
    return End(EndKind.PEER_FAILED if blames_a_peer(error) else EndKind.TRACEBACK, 1, text, time)


def _raised_in(error: BaseException) -> str:
    """Return the file and line that raised an error, after the word "in"."""
    frames = traceback.extract_tb(error.__traceback__)
    return f" in {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def exit_text(exitcode: int) -> str:
    """Return how a process ended that exited by itself, without a report."""
    early = exitcode in (0, Paused.exit_code, Stopped.exit_code)
    return f"ended with exit code {exitcode}{' before it was done' if early else ''}"


def end_of_process(exitcode: int, time: float, *, stopping: bool = False) -> End:
    """Return the end of a process without a report.

    A code that the program, or a library, has chosen means nothing to a scheduler: the run has failed, with code 1.

    Args:
        exitcode: Minus the signal's number if one killed it.
        stopping: Whether a stop signal was sent to it.
    """
    if stopping and exitcode == Stopped.exit_code:
        return end_of_return(exitcode, time)
    if exitcode >= 0:
        return End(EndKind.EXITED, RunFailed.exit_code, exit_text(exitcode), time, status=exitcode)
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    if -exitcode in STOP_SIGNALS:
        return End(EndKind.INTERRUPTED, Stopped.exit_code, f"was stopped by {name}", time - _NOTICE_DELAY)
    # SIGABRT follows an uncaught C++ exception, such as a broken connection
    return End(EndKind.PEER_FAILED if name == "SIGABRT" else EndKind.KILLED, 1, f"was killed by {name}", time)


def while_reading(end: End, reading: Reading | None) -> End:
    """Return the end of a rank, without a report or by sys.exit(), with what it was reading then."""
    if reading is None or end.kind is EndKind.INTERRUPTED:
        return end
    # an abort in a decoder is no broken connection, and an exit in a dataset is neither an end nor a stop of the run
    by_signal = end.kind in (EndKind.KILLED, EndKind.PEER_FAILED)
    kind = EndKind.KILLED if by_signal else EndKind.EXITED
    text = end.text or exit_text(end.code)
    return with_reading(replace(end, kind=kind, code=RunFailed.exit_code, text=text), reading)


def with_reading(end: End, reading: Reading | None) -> End:
    """Return the end of a rank that was reading these samples; None: none."""
    if reading is None:
        return end
    return replace(end, samples=reading.samples, evaluation_set=reading.evaluation_set, reading=str(reading))


def first_cause(ends: Iterable[End | None]) -> int | None:
    """Return the rank whose end explains the others'; None if all are done or have not ended (None)."""
    reported = [(rank, end) for rank, end in enumerate(ends) if end is not None and end.kind is not EndKind.DONE]
    return min(reported, key=lambda item: (_WEIGHT.get(item[1].kind, 0), item[1].time))[0] if reported else None


def describe(
    rank: int, ends: Sequence[End | None], timeout: float, sigkill: str = "", hosts: Sequence[str] = ()
) -> str:
    """Return the message about the first cause. It names no rank if all have the same message.

    Args:
        timeout: Seconds that a collective may take.
        sigkill: Why a rank may have been killed by SIGKILL.
        hosts: The name of each rank's host, if there are several.
    """
    end = ends[rank]
    assert end is not None, "only a rank that has ended is a cause"
    name = f"rank {rank} on host {hosts[rank]}" if hosts else f"rank {rank}"
    reading = f"; it was reading {end.reading}" if end.reading else ""
    match end.kind:
        case EndKind.ROLLED_BACK:
            return end.text
        case EndKind.DIVERGED if end.differing and hosts:
            return f"{_places(end.differing, hosts).strip()}: {end.text}"
        case EndKind.MESSAGE | EndKind.DIVERGED | EndKind.STOPPED | EndKind.PAUSED if all(
            other is not None and other.text == end.text for other in ends
        ):
            return end.text
        case EndKind.TIMED_OUT:
            return "\n".join([_timeout(ends, end.time, timeout, hosts), *end.text.splitlines()[1:]])
        case EndKind.TRACEBACK | EndKind.PEER_FAILED if "\n" in end.text:
            return f"{name} failed:\n{end.text}" if len(ends) > 1 else end.text
        case EndKind.KILLED if end.text.endswith("SIGKILL") and sigkill:
            return f"{name} {end.text}: {sigkill}{reading}"
        case EndKind.LOST | EndKind.HUNG:
            return end.text
        case EndKind.CODE | EndKind.EXITED | EndKind.KILLED | EndKind.INTERRUPTED | EndKind.PEER_FAILED:
            return f"{name} {end.text}{reading}"
        case _:
            return f"{name}: {end.text}" if end.text else ""


def _timeout(ends: Sequence[End | None], since: float, timeout: float, hosts: Sequence[str]) -> str:
    """Return which ranks kept others waiting: those that had to be ended, or else those that failed later."""
    reported = [(rank, end) for rank, end in enumerate(ends) if end is not None]
    missing = [rank for rank, end in reported if end.kind is EndKind.ENDED] or [
        rank for rank, end in reported if end.kind is EndKind.PEER_FAILED and end.time > since + _LATE
    ]
    if missing:
        waiting = [rank for rank, _ in reported if rank not in missing]
        others = named_ranks(waiting) if len(waiting) == 1 else "the others"
        return timeout_message(named_ranks(missing) + _places(missing, hosts), others, timeout)
    return (
        f"no rank hangs, and yet a collective took longer than {timeout:g} s (launch.timeout). Either not all ranks "
        "call the same ones in the same order, or one is slow: then raise launch.timeout"
    )


def _places(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    names = [*dict.fromkeys(hosts[rank] for rank in ranks)] if hosts else []
    return f" on host{'s' * (len(names) > 1)} {listed(names, _MOST_HOSTS)}" if names else ""
