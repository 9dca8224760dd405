"""The kinds of failures, by what may follow.

kind         examples                                       started again
config       an error of the config                         never
request      Ctrl-C, SIGTERM, a scheduler's warning         never: the run is saved, and stops
message      Lockstep's own verdict on the run              never
memory       out of memory, the kernel's OOM killer         with smaller micro-batches, while there are any
program      KeyError in a dataset, sys.exit()              once at the same step: it may have been the host
transient    SIGKILL, a connection or a disk that failed    up to the limit
hang         a rank that doesn't move and others wait for   up to the limit
host         a host that can't be reached any more          up to the limit
rollback     bad numbers, before which the run goes back    always: the ranks count against the limit
"""

from __future__ import annotations

import re
from enum import Enum

from lockstep.core.control_groups import OOM_KILLER
from lockstep.core.heartbeat import Reading
from lockstep.launch.ends import End, EndKind
from lockstep.launch.ends_file import gist


class FailureKind(Enum):
    """The kinds of failures, as `recovery.budgets` names them."""

    CONFIG = "config"
    REQUEST = "request"
    MESSAGE = "message"
    MEMORY = "memory"
    PROGRAM = "program"
    TRANSIENT = "transient"
    HANG = "hang"
    HOST = "host"
    ROLLBACK = "rollback"


NEVER_RETRIED = {FailureKind.CONFIG, FailureKind.REQUEST, FailureKind.MESSAGE}
"""Failures that a start of the same run would meet again, and requests."""
_BY_END = {
    EndKind.PEER_FAILED: FailureKind.TRANSIENT,
    EndKind.DIVERGED: FailureKind.TRANSIENT,  # no such state is saved
    EndKind.STOPPED: FailureKind.TRANSIENT,  # by another process than the launcher
    EndKind.TIMED_OUT: FailureKind.HANG,
    EndKind.HUNG: FailureKind.HANG,
    EndKind.LOST: FailureKind.HOST,
    EndKind.ROLLED_BACK: FailureKind.ROLLBACK,
    EndKind.TRACEBACK: FailureKind.PROGRAM,
    EndKind.EXITED: FailureKind.PROGRAM,
    EndKind.CODE: FailureKind.PROGRAM,
    EndKind.MESSAGE: FailureKind.MESSAGE,
}
_CONFIG_CODE = 2
# Exceptions of connections, disks and drivers. A wrong path or a missing permission is the program's.
_TRANSIENT = re.compile(
    r"^(OSError|IOError|ConnectionError|Connection\w+Error|TimeoutError|BrokenPipeError|InterruptedError|socket\.\w+"
    r"|requests\.exceptions\.\w+|urllib3\.exceptions\.\w+|botocore\.exceptions\.\w+)\b"
    r"|CUDA error|NCCL error|uncorrectable ECC|CUBLAS_STATUS|CUDNN_STATUS",
)


def kind_of(end: End, text: str = "") -> FailureKind:
    """Return the kind of a failure, from the end of the rank that failed first.

    Args:
        text: The message of its round, which has the cause of a SIGKILL.
    """
    if end.kind is EndKind.MESSAGE and end.code == _CONFIG_CODE:
        return FailureKind.CONFIG
    if end.advice or end.too_large or (was_killed(end) and OOM_KILLER in f"{end.text}{text}"):
        return FailureKind.MEMORY
    if was_killed(end):
        return FailureKind.TRANSIENT
    if end.worker_has_exited:
        return FailureKind.PROGRAM
    kind = _BY_END.get(end.kind, FailureKind.REQUEST)
    if kind is FailureKind.PROGRAM and end.kind is EndKind.TRACEBACK and _TRANSIENT.search(gist(end.text)):
        return FailureKind.TRANSIENT
    return kind


def was_killed(end: End) -> bool:
    """Return whether a signal killed the rank, or SIGKILL one of its data workers."""
    return end.kind is EndKind.KILLED or end.worker_was_killed


def advice_on_samples(end: End) -> str:
    """Return what to do about the samples that a process was reading as it ended; empty if it was reading none."""
    if not end.samples:
        return ""
    mend = f"mend {Reading(end.samples, end.evaluation_set)}, or leave it out"
    if end.evaluation_set is not None:
        return f"{mend} of the set (data.leave_out is for training samples), then start the run again to resume"
    key = f"data.leave_out='[[{end.samples[0]}, {end.samples[0]}]]'" if len(end.samples) == 1 else "data.leave_out"
    return f"{mend} by {key}, then start the run again to resume (mended data may need --accept-changes)"


def advice_after(kind: FailureKind) -> str:
    """Return what to do after a run that has failed too often; empty where its message has that."""
    match kind:
        case FailureKind.PROGRAM:
            return "the same failure would come again: mend the program or its data, then start the run again to resume"
        case FailureKind.TRANSIENT | FailureKind.HANG:
            return "look at the host (`lockstep doctor RUN` reads what is left), then start the run again to resume"
        case FailureKind.HOST:
            return "look at the host and its network, then start the run again on all hosts to resume"
    return ""
