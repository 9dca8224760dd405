"""How ranks ended, and which of them failed first.

    rank 0   ......................raises "connection closed by peer"     a consequence, though reported first
    rank 1   ....killed by SIGKILL                                        the cause
    rank 2   ............................................ended            by the launcher: nothing to report

Causes are ordered by their kinds' weights (errors that a peer's failure explains come last), then by time. A rank that
hangs reports nothing: it is identified by the others, which have waited.
"""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from time import monotonic
from types import TracebackType
from typing import Any

from lockstep.core.control_groups import WhyKilled
from lockstep.core.errors import (
    ConfigError,
    Failure,
    OutOfMemory,
    Paused,
    Problem,
    ReplicasDiffer,
    SampleFailure,
    Stopped,
    blames_a_peer,
    message_of,
    named_ranks,
    timeout_message,
)
from lockstep.core.failure_kinds import FailureKind
from lockstep.core.formatting import listed
from lockstep.core.heartbeat import Reading
from lockstep.core.stopping import STOP_SIGNALS

_LATE = 2.0  # seconds after the first timeout: a rank that then finds the group broken was not waiting
_NOTICE_DELAY = 0.5  # seconds that a rank's death by a signal may be noticed after its consequences
_MOST_HOSTS = 4  # in a message
_MOST_CHARACTERS = 12_000  # of a report, so that it reaches the launcher in one piece
_OF_PROCESS = {
    FailureKind.EXITED, FailureKind.CRASHED, FailureKind.KILLED, FailureKind.HOST_MEMORY, FailureKind.INTERRUPTED,
    FailureKind.PEER_FAILED,
}  # fmt: skip
CAUSED_BY_STOP = (FailureKind.STOPPED, FailureKind.INTERRUPTED, FailureKind.PEER_FAILED, FailureKind.ENDED)
"""How ranks end after a signal to all processes."""
_OF_CONNECTIONS = ("requests.", "urllib3.", "botocore.", "socket")
_OF_DEVICE = re.compile(r"CUDA error|NCCL error|uncorrectable ECC|CUBLAS_STATUS|CUDNN_STATUS")


@dataclass(frozen=True, slots=True)
class End:
    """The end of a rank.

    Attributes:
        text: A message, a traceback, or a sentence to show.
        time: When the rank raised, returned or was found dead, in seconds (CLOCK_MONOTONIC, the same in all processes).
        detail: A traceback for the rank's log; empty if `text` has it, or if there is none.
        advice, too_large: As of OutOfMemory; `text` contains the advice.
        samples: The one that ended it while being read, or several candidates.
        evaluation_set: The evaluation set that they are of; None: the training data.
        differing: The ranks with copies of the training state that differ from most ranks'.
        status: The process's exit code, or minus a signal, if it has ended without a report.
        evaluates: Whether it has ended in an evaluation, without a report.
        left_by: Why the launcher of a rank's host has left the run (LOST); None: nothing is known of it.
    """

    kind: FailureKind
    text: str
    time: float
    detail: str = ""
    problems: tuple[Problem, ...] = ()
    advice: str = ""
    too_large: Mapping[str, int] = field(default_factory=dict)
    samples: tuple[int, ...] = ()
    evaluation_set: str | None = None
    differing: tuple[int, ...] = ()
    status: int | None = None
    evaluates: bool = False
    left_by: FailureKind | None = None

    @property
    def cause(self) -> FailureKind:
        """The kind of the run's end, if this end is its cause."""
        return self.left_by or self.kind


def end_fields(end: End) -> dict[str, Any]:
    """Return an end for a message to another host, which has another clock."""
    left_by = None if end.left_by is None else end.left_by.name
    return {**asdict(end), "kind": end.kind.name, "left_by": left_by, "time": monotonic() - end.time}


def end_of_fields(fields: Mapping[str, Any]) -> End:
    """Return the end that a message states."""
    changed: dict[str, Any] = {name: tuple(fields[name]) for name in ("samples", "differing")}
    changed |= {name: FailureKind[fields[name]] for name in ("kind", "left_by") if fields[name] is not None}
    changed["problems"] = tuple(Problem(**problem) for problem in fields["problems"])
    return End(**{**fields, **changed, "time": monotonic() - fields["time"]})


def end_of_return(code: int, time: float) -> End:
    """Return the end of an entry that returned an exit code."""
    kinds = (FailureKind.DONE, FailureKind.STOPPED, FailureKind.PAUSED, FailureKind.WRONG)
    kind = next((kind for kind in kinds if kind.exit_code == code), FailureKind.EXITED)
    return End(kind, "" if kind is not FailureKind.EXITED else exit_text(code), time)


def end_of_exception(error: BaseException, time: float, frames: TracebackType | None) -> End:
    """Return the end of an entry that raised. `frames` are those to show."""
    match error:
        case Paused():
            return End(error.kind, str(error), time)
        case KeyboardInterrupt():
            saved = message_of(error).removeprefix(str(error))
            return End(FailureKind.STOPPED, f"interrupted by a KeyboardInterrupt{_raised_in(error)}{saved}", time)
        case Failure():
            return _end_of_failure(error, time)
        case SystemExit(code=int() | None):
            saved = message_of(error).removeprefix(str(error))
            return End(FailureKind.EXITED, f"called sys.exit({int(error.code or 0)}){_raised_in(error)}{saved}", time)
        case SystemExit():
            return End(FailureKind.FAILED, message_of(error), time)
    text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    half = _MOST_CHARACTERS // 2
    if len(text) > _MOST_CHARACTERS:  # a traceback's beginning and end matter
        text = f"{text[:half]}\n  ... {len(text) - 2 * half} characters ...\n{text[-half:]}"
    if blames_a_peer(error):
        return End(FailureKind.PEER_FAILED, text, time)
    return End(FailureKind.DEVICE if _is_of_device(error) else FailureKind.EXCEPTION, text, time)


def _end_of_failure(error: Failure, time: float) -> End:
    cause = None if error.kind.weight else error.__cause__
    detail = "".join(traceback.format_exception(cause)).rstrip() if cause is not None else ""
    end = End(error.kind, message_of(error).strip(), time, detail)
    match error:
        case ConfigError():
            return replace(end, problems=error.problems)
        case OutOfMemory():
            return replace(end, advice=error.advice, too_large=error.too_large)
        case SampleFailure():
            return replace(end, samples=error.samples, evaluation_set=error.evaluation_set)
        case ReplicasDiffer():
            return replace(end, differing=error.ranks)
    return end


def _is_of_device(error: BaseException) -> bool:
    """Return whether a connection, a disk or a driver failed; a wrong path or permission is the program's fault."""
    if isinstance(error, ConnectionError | TimeoutError | InterruptedError) or type(error) is OSError:
        return True
    return type(error).__module__.startswith(_OF_CONNECTIONS) or _OF_DEVICE.search(str(error)) is not None


def _raised_in(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return f" in {frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def exit_text(exitcode: int) -> str:
    """Return how a process ended that exited by itself, without a report."""
    early = exitcode in (0, Paused.exit_code, Stopped.exit_code)
    return f"ended with exit code {exitcode}{' before it was done' if early else ''}"


def end_of_process(exitcode: int, time: float, *, stopping: bool = False) -> End:
    """Return the end of a process without a report; `stopping`: a stop signal was sent to it."""
    if stopping and exitcode == Stopped.exit_code:
        return End(FailureKind.STOPPED, "", time)
    if exitcode >= 0:
        return End(FailureKind.EXITED, exit_text(exitcode), time, status=exitcode)
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    if -exitcode in STOP_SIGNALS:
        return End(FailureKind.INTERRUPTED, f"was stopped by {name}", time - _NOTICE_DELAY)
    # SIGABRT follows an uncaught C++ exception, such as a broken connection
    kinds: dict[int, FailureKind] = {signal.SIGABRT: FailureKind.PEER_FAILED, signal.SIGKILL: FailureKind.KILLED}
    return End(kinds.get(-exitcode, FailureKind.CRASHED), f"was killed by {name}", time, status=exitcode)


def with_cause(end: End, why_killed: Callable[[], WhyKilled]) -> End:
    """Return the end of a rank that SIGKILL has ended with the cause of that; any other end as it is."""
    if end.kind is not FailureKind.KILLED:
        return end
    why = why_killed()
    return replace(end, kind=FailureKind.HOST_MEMORY if why.by_kernel else end.kind, text=f"{end.text}: {why.text}")


def while_reading(end: End, reading: Reading | None) -> End:
    """Return the end of a rank, without a report or by sys.exit(), with what it was reading then."""
    if reading is None or end.kind is FailureKind.INTERRUPTED:
        return end
    # an abort in a decoder is no broken connection, and an exit in a dataset is neither an end nor a stop of the run
    kind = FailureKind.CRASHED if end.kind is FailureKind.PEER_FAILED else end.kind
    if kind not in (FailureKind.CRASHED, FailureKind.KILLED):
        kind = FailureKind.EXITED
    text = f"{end.text or exit_text(end.kind.exit_code)} while it read {reading}"
    return with_reading(replace(end, kind=kind, text=text), reading)


def with_reading(end: End, reading: Reading | None) -> End:
    """Return the end of a rank that was reading these samples; None: none."""
    if reading is None:
        return end
    return replace(end, samples=reading.samples, evaluation_set=reading.evaluation_set)


def first_cause(ends: Iterable[End | None]) -> int | None:
    """Return the rank that explains the others' ends; None if all are done or have not ended (None)."""
    reported = [(rank, end) for rank, end in enumerate(ends) if end is not None and end.kind is not FailureKind.DONE]
    return min(reported, key=lambda item: (item[1].kind.weight, item[1].time))[0] if reported else None


def describe(rank: int, ends: Sequence[End | None], timeout: float, hosts: Sequence[str] = ()) -> str:
    """Return the message about the first cause; `hosts`: the name of each rank's host, if there are several."""
    end = ends[rank]
    assert end is not None, "only a rank that has ended is a cause"
    name = f"rank {rank} on host {hosts[rank]}" if hosts else f"rank {rank}"
    match end.kind:
        case FailureKind.ROLLED_BACK | FailureKind.LOST | FailureKind.HUNG:
            return end.text
        case FailureKind.DIVERGED if end.differing and hosts:
            return f"{_places(end.differing, hosts).strip()}: {end.text}"
        case FailureKind.TIMED_OUT:
            return "\n".join([_timeout(ends, end.time, timeout, hosts), *end.text.splitlines()[1:]])
        case FailureKind.EXCEPTION | FailureKind.DEVICE | FailureKind.PEER_FAILED if "\n" in end.text:
            return f"{name} failed:\n{end.text}" if len(ends) > 1 else end.text
        case kind if kind in _OF_PROCESS:
            return f"{name} {end.text}"
    if all(other is not None and other.text == end.text for other in ends):
        return end.text
    return f"{name}: {end.text}" if end.text else ""


def _timeout(ends: Sequence[End | None], since: float, timeout: float, hosts: Sequence[str]) -> str:
    """Return which ranks kept others waiting: ranks that had to be ended, or else ranks that failed later."""
    reported = [(rank, end) for rank, end in enumerate(ends) if end is not None]
    late = [rank for rank, end in reported if end.kind is FailureKind.PEER_FAILED and end.time > since + _LATE]
    missing = [rank for rank, end in reported if end.kind is FailureKind.ENDED] or late
    if missing:
        waiting = [rank for rank, _ in reported if rank not in missing]
        others = named_ranks(waiting) if len(waiting) == 1 else "the others"
        return timeout_message(named_ranks(missing) + _places(missing, hosts), others, timeout)
    why = "Not all ranks call the same ones in the same order, or one is slow: then raise launch.timeout"
    return f"no rank hangs, and yet a collective took longer than {timeout:g} s (launch.timeout). {why}"


def _places(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    names = [*dict.fromkeys(hosts[rank] for rank in ranks)] if hosts else []
    return f" on host{'s' * (len(names) > 1)} {listed(names, _MOST_HOSTS)}" if names else ""
