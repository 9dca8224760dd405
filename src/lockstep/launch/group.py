"""The ranks of one launch, from the outside: started, watched, ended.

    start --> watch --------------------------------------------------------------> an End for each rank
                |- all return                      -> done
                |- one fails       the others may fail of it, then SIGTERM, then SIGKILL
                |- asked to stop   SIGTERM once; they have `patience` seconds; then, or if asked again, SIGKILL

Nothing polls: the launcher sleeps until a rank reports, a process ends, a signal comes or a deadline passes.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing.connection
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import FrameType

from lockstep.launch.ends import End, Kind, end_of_process

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_SETTLE = 1.0  # seconds for the other ranks to say how they fail, once one has
_SETTLE_PEER = 5.0  # the same while only consequences are known: the cause may be a rank still unwinding
_SETTLE_WAITED = 0.1  # of what a collective may take: who began to wait later has waited in vain later
_GRACE = 5.0  # seconds between SIGTERM and SIGKILL, when the run has failed anyway
_SAME_REQUEST = 0.5  # seconds: signals as close as that are one (timeout(1), and shells, send to process and group)


class StopRequests:
    """How often somebody has asked the run to stop; readable (`fileno`) when one has come."""

    def __init__(self) -> None:
        self.count = 0
        self._last = -math.inf
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)

    def fileno(self) -> int:
        return self._read

    def note(self, number: int, frame: FrameType | None) -> None:
        """A signal handler."""
        now = time.monotonic()
        if now - self._last >= _SAME_REQUEST:
            self._last = now
            self.count += 1
        os.write(self._write, b"!")

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read, 64):
                pass

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)


@contextlib.contextmanager
def stop_requests() -> Iterator[StopRequests]:
    """SIGINT, SIGTERM and SIGHUP count as requests; those that this process ignores (nohup) stay ignored.

    Outside the main thread Python lets nobody listen, and none come.
    """
    requests = StopRequests()
    before = {}
    if threading.current_thread() is threading.main_thread():
        heard = [number for number in STOP_SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
        before = {number: signal.signal(number, requests.note) for number in heard}
    try:
        yield requests
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        requests.close()


@contextlib.contextmanager
def held_signals() -> Iterator[None]:
    """Stop signals wait until the block is left; ranks started within let them in when they are ready for them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@dataclass
class Member:
    """A rank's process, and what is known of it."""

    process: BaseProcess
    channel: Connection
    reported: End | None = None
    ended: End | None = None
    _signalled: bool = field(default=False, init=False)
    _silent: bool = field(default=False, init=False)
    _handle: int = field(init=False)

    def __post_init__(self) -> None:
        # A pidfd tells of the end of this one process; multiprocessing's sentinel also waits for its children.
        assert self.process.pid is not None
        self._handle = os.pidfd_open(self.process.pid) if sys.platform == "linux" else self.process.sentinel

    def news(self) -> list[int | Connection]:
        """What becomes readable when there is something to look at."""
        return [self._handle] if self._silent or self.reported else [self._handle, self.channel]

    def look(self) -> None:
        exitcode = self.process.exitcode  # first: what it said before it ended is in the channel
        self._listen()
        if exitcode is not None:
            self.ended = self._conclude(exitcode)

    def signal(self, number: signal.Signals) -> None:
        """What ends it from now on is our doing."""
        self._signalled = True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, number)

    def release(self) -> None:
        """It may go: nobody else needs it."""
        with contextlib.suppress(OSError):
            self.channel.send(None)

    def close(self) -> None:
        self.process.join()
        self.process.close()
        self.channel.close()
        if sys.platform == "linux":
            os.close(self._handle)

    def _listen(self) -> None:
        if self.reported or self._silent or not self.channel.poll():
            return
        try:
            end: End = self.channel.recv()
        except (EOFError, OSError):
            self._silent = True
            return
        self.reported = _our_doing(end) if self._signalled and end.kind is Kind.STOPPED else end

    def _conclude(self, exitcode: int) -> End:
        if self.reported is not None and (self.reported.kind is not Kind.DONE or exitcode == 0):
            return self.reported
        found = end_of_process(exitcode, time.monotonic())
        return _our_doing(found) if self._signalled and exitcode < 0 else found


@dataclass
class _Deadlines:
    """When the ranks still running will be ended (seconds, CLOCK_MONOTONIC)."""

    terminate: float = math.inf
    kill: float = math.inf
    terminated: bool = False

    def timeout(self) -> float | None:
        """Seconds until the next one; None if there is none."""
        nearest = min(self.terminate, self.kill)
        return None if nearest == math.inf else max(0.0, nearest - time.monotonic())


def watch(members: Sequence[Member], requests: StopRequests, patience: float) -> list[End]:
    """Waits until all have ended, and sees to it that they do. Returns how, by rank."""
    deadlines = _Deadlines()
    heard = 0
    while living := [member for member in members if member.ended is None]:
        if living == [members[0]]:
            members[0].release()
        news = [thing for member in living for thing in member.news()]
        multiprocessing.connection.wait([*news, requests.fileno()], deadlines.timeout())
        requests.drain()
        for member in living:
            member.look()
        if requests.count > heard:
            heard = requests.count
            _hear(heard, living, deadlines, patience)
        _foresee(members, deadlines, patience)
        _enforce(living, deadlines)
    return [member.ended for member in members if member.ended is not None]


def _hear(count: int, living: Sequence[Member], deadlines: _Deadlines, patience: float) -> None:
    """The first request goes to the ranks, once; the second ends them."""
    if count > 1:
        deadlines.kill = 0.0
        return
    for member in living:
        member.signal(signal.SIGTERM)
    deadlines.kill = min(deadlines.kill, time.monotonic() + patience)


def _foresee(members: Sequence[Member], deadlines: _Deadlines, patience: float) -> None:
    """A rank that has gone, other than by being done, takes the others with it."""
    if deadlines.terminated:
        return
    kinds = [end.kind for member in members if (end := member.ended or member.reported)]
    deadlines.terminate = min(deadlines.terminate, time.monotonic() + _wait_for(kinds, len(members), patience))


def _wait_for(heard: Sequence[Kind], ranks: int, patience: float) -> float:
    """Seconds for the ranks that have not been heard yet."""
    kinds = set(heard)
    if kinds & {Kind.MESSAGE, Kind.TRACEBACK, Kind.CODE, Kind.KILLED}:
        return _SETTLE
    if Kind.WAITED in kinds and len(heard) < ranks - 1:
        return max(_SETTLE_PEER, _SETTLE_WAITED * patience)
    if kinds & {Kind.WAITED, Kind.PEER}:
        return _SETTLE_PEER
    if kinds & {Kind.STOPPED, Kind.PAUSED}:  # an orderly stop; some have more to write than others
        return patience
    return math.inf


def _enforce(living: Sequence[Member], deadlines: _Deadlines) -> None:
    now = time.monotonic()
    if now >= deadlines.kill:
        _signal_all(living, signal.SIGKILL)
        deadlines.terminate = deadlines.kill = math.inf
    elif now >= deadlines.terminate:
        _signal_all(living, signal.SIGTERM)
        deadlines.terminated = True
        deadlines.terminate, deadlines.kill = math.inf, min(deadlines.kill, now + _GRACE)


def _signal_all(living: Sequence[Member], number: signal.Signals) -> None:
    for member in living:
        if member.ended is None:
            member.signal(number)


def _our_doing(end: End) -> End:
    return End(Kind.ENDED, end.code, "", end.time)
