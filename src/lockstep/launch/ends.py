"""The ends of ranks, and which of them was the first cause.

    rank 0   ......................raises "connection closed by peer"     a consequence, though rank 0 says it first
    rank 1   ....killed by SIGKILL                                        the cause
    rank 2   ............................................ended by us      nothing to tell

A rank that fails breaks its peers' collectives, and theirs may be the first words heard. So causes are ordered by
kind first (what a broken peer explains comes last), then by time.

    rank 0   ..............waited in vain         a consequence as well: `launch.timeout` is over
    rank 1   .......................ended by us   the cause, and silent

A rank that hangs says nothing. It is known by what the others say: they have waited, and it hasn't.
"""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from types import TracebackType

from lockstep.core.errors import (
    CollectiveTimeout,
    ConfigError,
    Failure,
    Paused,
    PeerFailed,
    Problem,
    Stopped,
    blames_a_peer,
    message_of,
    timeout_message,
)
from lockstep.core.stopping import STOP_SIGNALS


class EndKind(Enum):
    """How a rank ended."""

    DONE = "returned 0"
    MESSAGE = "raised a Failure: people read its message, not its traceback"
    TRACEBACK = "raised another exception"
    CODE = "returned a code of its own"
    LEFT = "called sys.exit() or the like, before it was done"
    KILLED = "by a signal"
    STOPPED = "asked by somebody other than its launcher"
    INTERRUPTED = "killed by a signal that asks for a stop: nothing was trained"
    PAUSED = "asked by anybody, and all is saved"
    WAITED = "in a collective, and not all came"
    PEER = "of an error that the end of a peer explains"
    ENDED = "asked or killed by its launcher"


_WEIGHT = {EndKind.PAUSED: 1, EndKind.WAITED: 2, EndKind.PEER: 3, EndKind.ENDED: 4}  # explained by any that weighs less

_LATE = 2.0  # seconds after the first has waited in vain: whoever then finds the group broken had not been waiting
_EXPLAINS = 0.5  # seconds that a rank's death by a signal may be noticed after what it made others do
_NAMED = 8  # ranks, at most, in a sentence
_LONGEST = 12_000  # characters of a report, so that it reaches the launcher in one piece


@dataclass(frozen=True, slots=True)
class End:
    """The end of a rank.

    Attributes:
        code: the exit code for whoever started the run.
        text: what to show: a message, a traceback, or a sentence.
        time: seconds (CLOCK_MONOTONIC, one clock for all processes) when the rank raised, returned or was found dead.
        detail: a traceback for the rank's log; empty if `text` has it, or if there is none.
        problems: of a ConfigError.
    """

    kind: EndKind
    code: int
    text: str
    time: float
    detail: str = ""
    problems: tuple[Problem, ...] = ()


def end_of_return(code: int, time: float) -> End:
    """Return the end of an entry that returned, or of a process that exited with `code` and no report."""
    if code == 0:
        return End(EndKind.DONE, 0, "", time)
    if code == Stopped.exit_code:
        return End(EndKind.STOPPED, code, "", time)
    if code == Paused.exit_code:
        return End(EndKind.PAUSED, code, "", time)
    return End(EndKind.CODE, code, f"ended with exit code {code}", time)


def end_of_exception(error: BaseException, time: float, frames: TracebackType | None) -> End:
    """Return the end of an entry that raised. `frames` are those to show."""
    match error:
        case Paused():
            return End(EndKind.PAUSED, Paused.exit_code, str(error), time)
        case Stopped() | KeyboardInterrupt():
            return End(EndKind.STOPPED, Stopped.exit_code, message_of(error).strip(), time)
        case CollectiveTimeout():
            return End(EndKind.WAITED, error.exit_code, message_of(error), time)
        case PeerFailed():
            return End(EndKind.PEER, error.exit_code, message_of(error), time)
        case ConfigError():
            return End(EndKind.MESSAGE, error.exit_code, message_of(error), time, detail_of(error), error.problems)
        case Failure():
            return End(EndKind.MESSAGE, error.exit_code, message_of(error), time, detail_of(error))
        case SystemExit(code=int() | None):
            return End(EndKind.LEFT, int(error.code or 0), _exited(error), time)
        case SystemExit():
            return End(EndKind.MESSAGE, 1, message_of(error), time)
    text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    return End(EndKind.PEER if blames_a_peer(error) else EndKind.TRACEBACK, 1, _shortened(text), time)


def _exited(error: SystemExit) -> str:
    """Return which line of user code ended the rank, and what was saved of the run."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" in {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    saved = message_of(error).removeprefix(str(error))
    return f"called sys.exit({error.code or 0}){where}{saved}"


def detail_of(failure: Failure) -> str:
    """Return the traceback of what a failure was raised from; empty if there is none."""
    cause = failure.__cause__
    return "" if cause is None else "".join(traceback.format_exception(cause)).rstrip()


def end_of_process(exitcode: int, time: float) -> End:
    """Return the end of a process without a report; `exitcode` is minus the signal's number if one killed it."""
    if exitcode == 0:
        return End(EndKind.LEFT, 0, "ended with exit code 0 before it was done", time)
    if exitcode > 0:
        return end_of_return(exitcode, time)
    name = _signal_name(-exitcode)
    if -exitcode in STOP_SIGNALS:
        return End(EndKind.INTERRUPTED, Stopped.exit_code, f"was stopped by {name}", time - _EXPLAINS)
    if name == "SIGABRT":  # what C++ does with an exception nobody catches; a broken connection is one
        return End(EndKind.PEER, 1, f"was killed by {name}", time)
    return End(EndKind.KILLED, 1, f"was killed by {name}", time)


def first_cause(ends: Iterable[End | None]) -> int | None:
    """Return the rank whose end explains the others', or None if all are done or have no end (None). Ranks that have
    left with code 0 are as good as done, unless others have failed."""
    reported = [(rank, end) for rank, end in enumerate(ends) if end is not None and end.kind is not EndKind.DONE]
    if all(end.kind is EndKind.LEFT and end.code == 0 for _, end in reported):
        return None
    return min(reported, key=lambda item: (_WEIGHT.get(item[1].kind, 0), item[1].time))[0]


def describe(rank: int, ends: Sequence[End | None], timeout: float, sigkill: str = "") -> str:
    """Return the message about the first cause. A message that all ranks have in common names none of them.

    Args:
        timeout: seconds that a collective may take.
        sigkill: why a rank may have been killed by SIGKILL.
    """
    end = ends[rank]
    assert end is not None, "only a rank that has ended is a cause"
    match end.kind:
        case EndKind.MESSAGE | EndKind.STOPPED | EndKind.PAUSED if all(
            of is not None and of.text == end.text for of in ends
        ):
            return end.text
        case EndKind.WAITED:
            return "\n".join([_waiting(ends, end.time, timeout), *end.text.splitlines()[1:]])
        case EndKind.TRACEBACK | EndKind.PEER if "\n" in end.text:
            return f"rank {rank} failed:\n{end.text}" if len(ends) > 1 else end.text
        case EndKind.KILLED if end.text.endswith("SIGKILL") and sigkill:
            return f"rank {rank} {end.text}: {sigkill}"
        case EndKind.CODE | EndKind.LEFT | EndKind.KILLED | EndKind.INTERRUPTED | EndKind.PEER:
            return f"rank {rank} {end.text}"
        case _:
            return f"rank {rank}: {end.text}" if end.text else ""


def _waiting(ends: Sequence[End | None], since: float, timeout: float) -> str:
    """Return the ranks that let others wait: those that had to be ended, or else those that came later."""
    reported = [(rank, end) for rank, end in enumerate(ends) if end is not None]
    missing = [rank for rank, end in reported if end.kind is EndKind.ENDED]
    missing = missing or [rank for rank, end in reported if end.kind is EndKind.PEER and end.time > since + _LATE]
    if missing:
        waiting = [rank for rank, _ in reported if rank not in missing]
        return timeout_message(_named(missing), _named(waiting) if len(waiting) == 1 else "the others", timeout)
    return (
        f"no rank hangs, and yet a collective took longer than {timeout:g} s (launch.timeout). Either not all ranks "
        "call the same ones in the same order, or one is slow: then raise launch.timeout"
    )


def _named(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > _NAMED:
        return f"ranks {', '.join(map(str, ranks[:_NAMED]))} and {len(ranks) - _NAMED} more"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"


def _shortened(text: str) -> str:
    """Return the text without its middle if it is too long: a traceback's beginning and end matter."""
    half = _LONGEST // 2
    return (
        text if len(text) <= _LONGEST else f"{text[:half]}\n  ... {len(text) - 2 * half} characters ...\n{text[-half:]}"
    )


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
