"""The ranks of one launch, from the outside: started, watched, ended.

    start --> watch --------------------------------------------------------------> an End for each rank
                |- all return                      -> done
                |- one fails       the others may fail of it, then SIGTERM, then SIGKILL
                |- asked to stop   SIGTERM once; they have `patience` seconds; then, or if asked again, SIGKILL
                |                  one dies of it: it had nothing to save, and the others can't without it: SIGKILL
                |- asked to save   SIGUSR2

Nothing polls: the launcher sleeps until a rank reports, a process ends, a signal comes or a deadline passes.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing.connection
import os
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from types import FrameType

from lockstep.core.stopping import SAVE_SIGNAL, STOP_SIGNALS
from lockstep.launch.ends import End, EndKind, end_of_process

_SETTLE = 1.0  # seconds for the other ranks to say how they fail, once one has
_SETTLE_PEER = 5.0  # the same while only consequences are known: the cause may be a rank still unwinding
_SETTLE_WAITED = 0.1  # of what a collective may take: who began to wait later has waited in vain later
_GRACE = 5.0  # seconds between SIGTERM and SIGKILL, when the run has failed anyway
_SAME_REQUEST = 0.5  # seconds: signals as close as that are one (timeout(1), and shells, send to process and group)


class SignalRequests:
    """The requests that signals made of the launcher; readable (`fileno`) when there are new ones.

    Attributes:
        stops: how often somebody has asked the run to stop.
        saves: how often somebody has asked it to save and continue.
        last_stop: the signal that asked for a stop last.
    """

    def __init__(self) -> None:
        self.stops = self.saves = 0
        self.last_stop: signal.Signals | None = None
        self._stopped_at = -math.inf
        self._read, self._write = os.pipe()
        for end in (self._read, self._write):
            os.set_blocking(end, False)

    def fileno(self) -> int:
        return self._read

    def stop(self, number: int, frame: FrameType | None) -> None:
        """A signal handler."""
        now = time.monotonic()
        if now - self._stopped_at >= _SAME_REQUEST:
            self._stopped_at = now
            self.last_stop = signal.Signals(number)
            self.stops += 1
        self._wake()

    def save(self, number: int, frame: FrameType | None) -> None:
        """A signal handler."""
        self.saves += 1
        self._wake()

    def drain(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while os.read(self._read, 64):
                pass

    def close(self) -> None:
        os.close(self._read)
        os.close(self._write)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # it is full of news already
            os.write(self._write, b"!")


@dataclass
class Member:
    """A rank's process, and what is known of it."""

    process: BaseProcess
    channel: Connection
    reported: End | None = None
    ended: End | None = None
    _asked: bool = field(default=False, init=False)
    _ended_by_us: bool = field(default=False, init=False)
    _silent: bool = field(default=False, init=False)
    _handle: int = field(init=False)

    def __post_init__(self) -> None:
        # A pidfd tells of the end of this one process; multiprocessing's sentinel also waits for its children.
        assert self.process.pid is not None
        self._handle = os.pidfd_open(self.process.pid) if sys.platform == "linux" else self.process.sentinel

    def news(self) -> list[int | Connection]:
        """Return the descriptors that become readable when the rank has news."""
        return [self._handle] if self._silent or self.reported else [self._handle, self.channel]

    def look(self) -> None:
        exitcode = self.process.exitcode  # first: what it said before it ended is in the channel
        self._listen()
        if exitcode is not None:
            self.ended = self._conclude(exitcode)

    def ask(self, number: signal.Signals) -> None:
        """Passes on what somebody has asked for."""
        self._asked |= number in STOP_SIGNALS
        self._send(number)

    def end(self, number: signal.Signals) -> None:
        """End the rank; its end is then the launcher's doing."""
        if not self._ended_by_us:
            self._ended_by_us = True
            self.release()  # announced: it then tells how it was failing, if it was
        self._send(number)

    def release(self) -> None:
        """Let the rank exit: no other rank needs it."""
        with contextlib.suppress(OSError):
            self.channel.send(None)

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, number)

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
        ours = self._asked or self._ended_by_us
        self.reported = _our_doing(end) if ours and end.kind is EndKind.STOPPED else end

    def _conclude(self, exitcode: int) -> End:
        if self.reported is not None and (self.reported.kind is not EndKind.DONE or exitcode == 0):
            return self.reported
        end = end_of_process(exitcode, time.monotonic())
        return _our_doing(end) if self._ended_by_us and exitcode < 0 else end


@dataclass
class _Deadlines:
    """The time at which the ranks still running are ended (seconds, CLOCK_MONOTONIC)."""

    terminate: float = math.inf
    kill: float = math.inf
    terminated: bool = False

    def timeout(self) -> float | None:
        """Seconds until the next one; None if there is none."""
        nearest = min(self.terminate, self.kill)
        return None if nearest == math.inf else max(0.0, nearest - time.monotonic())


def watch(members: Sequence[Member], requests: SignalRequests, patience: float) -> list[End]:
    """Waits until all have ended, and sees to it that they do. Returns how, by rank."""
    deadlines = _Deadlines()
    stops = saves = 0
    while living := [member for member in members if member.ended is None]:
        if living == [members[0]]:
            members[0].release()
        news = [thing for member in living for thing in member.news()]
        multiprocessing.connection.wait([*news, requests.fileno()], deadlines.timeout())
        requests.drain()
        for member in living:
            member.look()
        if requests.saves > saves:
            saves = requests.saves
            for member in living:
                member.ask(SAVE_SIGNAL)
        if requests.stops > stops:
            stops = requests.stops
            _stop(stops, living, deadlines, patience)
        _foresee(members, deadlines, patience)
        _enforce(living, deadlines)
    return [member.ended for member in members if member.ended is not None]


def _stop(count: int, living: Sequence[Member], deadlines: _Deadlines, patience: float) -> None:
    """The first request goes to the ranks, once; the second ends them."""
    if count > 1:
        deadlines.kill = 0.0
        return
    for member in living:
        member.ask(signal.SIGTERM)
    deadlines.kill = min(deadlines.kill, time.monotonic() + patience)


def _foresee(members: Sequence[Member], deadlines: _Deadlines, patience: float) -> None:
    """A rank that has gone, other than by being done, takes the others with it."""
    if deadlines.terminated:
        return
    heard = [end for member in members if (end := member.ended or member.reported)]
    kinds = [EndKind.DONE if end.kind is EndKind.LEFT and end.code == 0 else end.kind for end in heard]
    if EndKind.INTERRUPTED in kinds:
        deadlines.kill = min(deadlines.kill, time.monotonic() + _SETTLE)
    deadlines.terminate = min(deadlines.terminate, time.monotonic() + _wait_for(kinds, len(members), patience))


def _wait_for(heard: Sequence[EndKind], ranks: int, patience: float) -> float:
    """Seconds for the ranks that have not been heard yet."""
    kinds = set(heard)
    if kinds & {EndKind.MESSAGE, EndKind.TRACEBACK, EndKind.CODE, EndKind.LEFT, EndKind.KILLED}:
        return _SETTLE
    if EndKind.WAITED in kinds and len(heard) < ranks - 1:
        return max(_SETTLE_PEER, _SETTLE_WAITED * patience)
    if kinds & {EndKind.WAITED, EndKind.PEER}:
        return _SETTLE_PEER
    if kinds & {EndKind.STOPPED, EndKind.PAUSED}:  # an orderly stop; some have more to write than others
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
            member.end(number)


def _our_doing(end: End) -> End:
    return End(EndKind.ENDED, end.code, "", end.time)
