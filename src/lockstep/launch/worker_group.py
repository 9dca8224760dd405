"""The processes of one launch's ranks: started, watched and ended by the launcher.

    start --> watch --------------------------------------------------------------> an End for each rank
                |- all return          -> done
                |- one fails           the others may fail because of it, then SIGTERM, then SIGKILL
                |- stop requested      SIGTERM once; SIGKILL after `patience` seconds, or at the second request, or
                |                      if one dies of SIGTERM, or hangs: the others can't save without it
                |- save requested      SIGUSR2

Ranks are forks of the launcher, or fresh interpreters that inherit a file in memory with their entry: multiprocessing's
pickler would put tensors into memory that all ranks share.
"""

from __future__ import annotations

import contextlib
import copyreg
import gc
import math
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import sys
import time
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import DupFd, ForkingPickler
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from lockstep.config.schema import Launch
from lockstep.config.training_sections import Watchdog
from lockstep.core.errors import ConfigError, Problem, RunFailed, message_of
from lockstep.core.failure_kinds import FailureKind
from lockstep.core.heartbeat import Heartbeat, shared_heartbeat
from lockstep.core.phase_clock import Phase
from lockstep.core.process_settings import open_closed_streams, set_environment
from lockstep.core.ranks import ADDRESS, LAUNCHER, NODES, RankEnvironment
from lockstep.core.safe_path import safe_interpreters
from lockstep.core.stopping import SAVE_SIGNAL, STOP_SIGNALS, SignalRequests, blocked_signals
from lockstep.launch import streams
from lockstep.launch.devices import threads_per_rank
from lockstep.launch.ends import End, end_of_process, while_reading
from lockstep.launch.hang_watch import HangWatch, LearnedTimes
from lockstep.launch.other_launchers import interface_variables
from lockstep.launch.rank import RankTask, run_rank

if TYPE_CHECKING:
    from lockstep.launch.agent import Hosts

_SETTLE = 1.0  # seconds for the other ranks to report how they fail, once one has
_SETTLE_PEER = 5.0  # the same while only consequences are known: the cause may be a rank that is still unwinding
_SETTLE_TIMEOUT = 0.1  # part of a collective's timeout: a rank that began to wait later times out later
_GRACE = 5.0  # seconds between SIGTERM and SIGKILL, if the run has failed anyway
_GRACE_SILENT = 1.0  # the same after a timeout or the loss of a host: no rank has an error left to report
_HANGS = 20.0  # seconds; a launcher that is this late to end its ranks hangs
_ORDERLY = {FailureKind.STOPPED, FailureKind.PAUSED}
_MAX_REASON_LENGTH = 300  # characters
_REASONS = (pickle.PicklingError, AttributeError, TypeError, RuntimeError)
_LOOPBACK = "127.0.0.1"


@dataclass
class RankProcess:
    """A rank's process, its heartbeat, what it has reported, and how it ended."""

    process: BaseProcess
    channel: Connection
    beat: Heartbeat | None = None
    reported: End | None = None
    ended: End | None = None
    _signaled: bool = field(default=False, init=False)  # with a stop signal, on request
    _ended_by_launcher: bool = field(default=False, init=False)
    _released: bool = field(default=False, init=False)
    _channel_closed: bool = field(default=False, init=False)
    _handle: int = field(init=False)

    def __post_init__(self) -> None:
        # A pidfd becomes readable when this process ends; multiprocessing's sentinel also waits for its children.
        assert self.process.pid is not None
        self._handle = os.pidfd_open(self.process.pid) if sys.platform == "linux" else self.process.sentinel

    def readable(self) -> list[int | Connection]:
        """Return the descriptors that become readable when the rank reports or ends."""
        return [self._handle] if self._channel_closed or self.reported else [self._handle, self.channel]

    def update(self) -> None:
        """Receive the rank's report, and note how it ended."""
        exitcode = self.process.exitcode  # first: the channel then has all that it reported before
        if not self.reported and not self._channel_closed and self.channel.poll():
            try:
                end: End = self.channel.recv()
                by_launcher = (self._signaled or self._ended_by_launcher) and end.kind is FailureKind.STOPPED
                self.reported = _by_launcher(end) if by_launcher else end
            except (EOFError, OSError):
                self._channel_closed = True
        if exitcode is None:
            return
        reading = None if self.beat is None else self.beat.reading()
        if self.reported is not None and (self.reported.kind is not FailureKind.DONE or exitcode == 0):
            if self.reported.kind is FailureKind.EXITED:
                self.reported = while_reading(self.reported, reading)
            self.ended = self.reported
            return
        end = end_of_process(exitcode, time.monotonic(), stopping=self._signaled)
        end = replace(end, evaluates=self.beat is not None and self.beat.is_in(Phase.EVALUATION))
        by_launcher = self._ended_by_launcher and exitcode < 0
        self.ended = _by_launcher(end) if by_launcher else while_reading(end, reading)

    def forward(self, number: signal.Signals) -> None:
        """Forward a requested signal to the rank."""
        self._signaled |= number in STOP_SIGNALS
        self._send(number)

    def end(self, number: signal.Signals) -> None:
        """End the rank, and count its end as caused by the launcher."""
        if not self._ended_by_launcher:
            self._ended_by_launcher = True
            self.release()  # announces the signal: the rank then reports how it was failing, if it was
        self._send(number)

    def kill_hung(self, end: End) -> None:
        """Kill a rank that hangs, and so handles no other signal; `end` states where."""
        self.reported = self.reported or end
        self._ended_by_launcher = True
        self._send(signal.SIGKILL)

    def release(self) -> None:
        """Let the rank exit: no other rank needs it. Sent once, since a pipe that isn't read gets full."""
        if not self._released:
            self._released = True
            with contextlib.suppress(OSError):
                self.channel.send(None)

    def close(self) -> None:
        self.process.join()
        self.process.close()
        self.channel.close()
        if sys.platform == "linux":
            os.close(self._handle)

    def _send(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid or 0, number)


@dataclass
class _Deadlines:
    """The times to end the ranks that still run (seconds, CLOCK_MONOTONIC)."""

    terminate: float = math.inf
    kill: float = math.inf
    others: float = math.inf  # when hosts that don't report how their ranks have ended count as lost
    terminated: bool = False

    def timeout(self, interval: float) -> float | None:
        """Return the seconds until the next one, `interval` at most; None if there is none."""
        seconds = min(interval, max(0.0, min(self.terminate, self.kill, self.others) - time.monotonic()))
        return None if seconds == math.inf else seconds


def watch(
    members: Sequence[RankProcess],
    requests: SignalRequests,
    patience: float,
    hosts: Hosts | None = None,
    hangs: HangWatch | None = None,
) -> list[End]:
    """Wait until all ranks have ended, and end this host's when they must; return how all ended, by rank."""
    deadlines, stops = _Deadlines(), 0
    ranks = dict(enumerate(members, 0 if hosts is None else hosts.here.first))
    ends: dict[int, End] = {}
    while (living := [member for member in members if member.ended is None]) or not _others_have_ended(hosts):
        if living == [members[0]] and members[0].reported is not None and _others_have_ended(hosts):
            members[0].release()
        readable = [handle for member in living for handle in member.readable()]
        readable += hosts.readable() if hosts is not None else []
        if hangs is not None:
            hangs.rest()
        interval = math.inf if hangs is None else hangs.interval
        multiprocessing.connection.wait([*readable, requests.fileno()], deadlines.timeout(interval))
        requests.drain()
        for member in living:
            member.update()
        if hangs is not None:
            hangs.look(members)
        ends = {rank: end for rank, member in ranks.items() if (end := member.ended or member.reported)}
        if hosts is not None:
            hosts.update()
            hosts.publish(ends, {rank for rank, member in ranks.items() if member.ended}, requests)
            ends = {**hosts.ends, **ends}
            if hosts.pause_is_due():
                _stop(1, living, deadlines, patience)
        if requests.saves > requests.passed_saves:
            requests.passed_saves = requests.saves
            for member in living:
                member.forward(SAVE_SIGNAL)
        if requests.stops > stops:
            stops = requests.stops
            _stop(stops, living, deadlines, min(patience, requests.patience))
        if stops and hangs is not None and hangs.has_named:  # the others can't save without it
            deadlines.kill = min(deadlines.kill, time.monotonic() + _GRACE)
        _set_deadlines(ends, deadlines, patience, hosts.size if hosts is not None else len(members))
        is_silent = any(end.kind in (FailureKind.TIMED_OUT, FailureKind.LOST) for end in ends.values())
        _enforce(living, deadlines, _GRACE_SILENT if is_silent else _GRACE)
        if hosts is not None:
            _give_up_others([member.ended for member in members], hosts, deadlines, patience, stops)
    ends = ends if hosts is None else {**hosts.ends, **ends}  # a host may have been given up since
    return [end for _, end in sorted(ends.items())]


def _others_have_ended(hosts: Hosts | None) -> bool:
    return hosts is None or hosts.others_have_ended()


def _stop(count: int, living: Sequence[RankProcess], deadlines: _Deadlines, patience: float) -> None:
    """Forward the first request to the ranks; kill them at the second."""
    if count > 1:
        deadlines.kill = 0.0
        return
    for member in living:
        member.forward(signal.SIGTERM)
    deadlines.kill = min(deadlines.kill, time.monotonic() + patience)


def _set_deadlines(ends: Mapping[int, End], deadlines: _Deadlines, patience: float, ranks: int) -> None:
    if deadlines.terminated:
        return
    kinds = [end.kind for end in ends.values()]
    if FailureKind.INTERRUPTED in kinds:
        deadlines.kill = min(deadlines.kill, time.monotonic() + _SETTLE)
    deadlines.terminate = min(deadlines.terminate, time.monotonic() + _settle_time(kinds, ranks, patience))


def _settle_time(kinds: Sequence[FailureKind], ranks: int, patience: float) -> float:
    """Return the seconds that the ranks without a report have left."""
    if any((kind.is_failure and not kind.weight) or kind is FailureKind.ROLLED_BACK for kind in kinds):
        return _SETTLE
    if FailureKind.TIMED_OUT in kinds:  # a rank that waits too began less than `patience` ago, and times out within it
        settle = min(_SETTLE_PEER, max(_SETTLE, patience))
        return max(settle, _SETTLE_TIMEOUT * patience) if len(kinds) < ranks - 1 else settle
    if FailureKind.PEER_FAILED in kinds:
        return _SETTLE_PEER
    if not _ORDERLY.isdisjoint(kinds):  # some have more to write than others
        return patience
    return math.inf


def _enforce(living: Sequence[RankProcess], deadlines: _Deadlines, grace: float) -> None:
    now = time.monotonic()
    running = [member for member in living if member.ended is None]
    if now >= deadlines.kill:
        for member in running:
            member.end(signal.SIGKILL)
        deadlines.terminate = deadlines.kill = math.inf
    elif now >= deadlines.terminate:
        for member in running:
            member.end(signal.SIGTERM)
        deadlines.terminated = True
        deadlines.terminate, deadlines.kill = math.inf, min(deadlines.kill, now + grace)


def _give_up_others(
    ends: Sequence[End | None], hosts: Hosts, deadlines: _Deadlines, patience: float, stops: int
) -> None:
    """Count other hosts as lost that don't report how their ranks end, a while after this one's have failed."""
    kinds = [end.kind for end in ends if end is not None]
    settle = 0.0 if stops > 1 else _settle_time(kinds, hosts.size, patience)
    if len(kinds) < len(ends) or settle == math.inf or hosts.others_have_ended():
        return
    now, limit = time.monotonic(), settle + _GRACE + _HANGS
    if deadlines.others == math.inf:
        deadlines.others = now + limit
    elif now >= deadlines.others:
        hosts.give_up(limit)


def _by_launcher(end: End) -> End:
    return End(FailureKind.ENDED, "", end.time)


# --- the start of ranks -----------------------------------------------------------------------------------------------


class SentEntry:
    """An entry that is pickled when a process is started with it: only then locks may be."""

    def __init__(self, entry: Callable[[], int]) -> None:
        self._entry = entry
        self._file: Any = None

    def __reduce__(self) -> tuple[Any, ...]:
        self._file = os.fdopen(os.memfd_create("entry"), "w+b")
        try:
            _write(self._entry, self._file)
        except _REASONS as error:
            raise _unsendable(error) from error
        self._file.flush()
        return _ReceivedEntry, (DupFd(self._file.fileno()),)


class _ReceivedEntry:
    def __init__(self, file: Any) -> None:
        self._file = file

    def __call__(self) -> int:
        import torch

        try:
            with os.fdopen(self._file.detach(), "rb") as file:
                file.seek(0)
                entry = torch.load(file, map_location="cpu", weights_only=False)
        except AttributeError as error:  # a class of an interactive `__main__`, without cloudpickle
            raise _unsendable(error) from error
        return entry()  # type: ignore[no-any-return]


def _write(entry: Callable[[], int], file: Any) -> None:
    import torch

    try:
        from cloudpickle import Pickler as ByValue
    except ImportError:
        ByValue = None
    if ByValue is None or "__file__" in vars(sys.modules["__main__"]):  # a script, which the ranks import
        try:
            return torch.save(entry, file, pickle_module=_pickle_module(pickle.Pickler, copyreg.dispatch_table))
        except _REASONS:
            if ByValue is None:
                raise
            file.seek(0)
            file.truncate()
    return torch.save(entry, file, pickle_module=_pickle_module(ByValue, ByValue.dispatch_table))


def _pickle_module(pickler: type[pickle.Pickler], table: MutableMapping[Any, Any]) -> Any:
    """Return a module for `torch.save` with a pickler that sends what multiprocessing does, and tensors' values."""
    reducers: dict[Any, Any] = ForkingPickler._extra_reducers  # type: ignore[attr-defined]
    others = {kind: how for kind, how in reducers.items() if not how.__module__.startswith("torch.")}

    class Pickler(pickler):  # type: ignore[misc, valid-type]
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.dispatch_table = ChainMap(others, table)

    return SimpleNamespace(__name__="pickle", Pickler=Pickler)


def _unsendable(error: Exception) -> ConfigError:
    return ConfigError(
        f"what the ranks need can't be sent to them, which are fresh interpreters: {str(error)[:_MAX_REASON_LENGTH]}. "
        "Install cloudpickle, or define functions and classes at the top of a module. Open files, locks and "
        "connections in the ranks, such as in the dataset's first __getitem__"
    )


@dataclass(frozen=True, slots=True)
class Ranks:
    """The arguments of a launch, as of `launch`."""

    entry: Callable[[], int]
    ranks: int
    section: Launch
    logs: Path | None
    forks: bool
    hosts: Hosts | None
    watchdog: Watchdog | None
    times: LearnedTimes = field(default_factory=LearnedTimes)

    @property
    def first(self) -> int:
        """The first of this machine's ranks among all."""
        return 0 if self.hosts is None else self.hosts.here.first

    @property
    def size(self) -> int:
        """Number of ranks on all hosts."""
        return self.ranks if self.hosts is None else self.hosts.size


@dataclass
class Round:
    """The processes of a round's ranks, and the watch over them."""

    job: Ranks
    hangs: HangWatch | None
    members: list[RankProcess] = field(default_factory=list)

    @classmethod
    def begin(cls, job: Ranks) -> Round:
        """Start the ranks of a round. Raises RunFailed where they can't be, for lack of descriptors for example."""
        hangs = None
        if job.watchdog is not None and job.watchdog.enabled:
            beats = [shared_heartbeat() for _ in range(job.ranks)]
            hangs = HangWatch(job.watchdog, beats, job.logs, job.first, alone=job.hosts is None, times=job.times)
        begun = cls(job, hangs)
        try:
            with blocked_signals(forks=job.forks), _store_listener(job) as listener:
                gc.freeze()  # forked ranks then never touch, and so never copy, the pages of existing objects
                try:
                    _start(job, listener, begun)
                finally:
                    gc.unfreeze()
        except BaseException as error:
            begun.close()
            if isinstance(error, OSError):
                raise RunFailed(f"its ranks can't be started: {message_of(error)}") from error
            raise
        return begun

    def close(self) -> None:
        """Kill the ranks that are left, and forget them."""
        if self.hangs is not None:
            self.hangs.close()
        for member in self.members:
            if member.ended is None:
                member.end(signal.SIGKILL)
        for member in self.members:
            member.close()


def _start(job: Ranks, listener: socket.socket | None, begun: Round) -> None:
    """Start the ranks and append them to the round, so that the caller can end them if one can't be started."""
    context: Any = multiprocessing.get_context("fork" if job.forks else "spawn")
    open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()  # or each forked rank would print it again
    ranks, hosts = job.ranks, job.hosts
    network = interface_variables(job.section.interface, "" if hosts is None else hosts.address)
    port = 0 if listener is None else int(listener.getsockname()[1])
    if hosts is not None:
        network = {NODES: str(len(hosts.world)), ADDRESS: hosts.address, **network}
        port = port or hosts.store_port
    share = {} if "OMP_NUM_THREADS" in os.environ else {"OMP_NUM_THREADS": str(threads_per_rank(ranks))}
    entry = job.entry if job.forks else SentEntry(job.entry)
    stdin = os.dup(0) if job.forks and job.size == 1 else None
    for place in range(ranks):
        rank = job.first + place
        log = streams.log_path(job.logs, rank) if job.logs else None
        beats = None if begun.hangs is None else begun.hangs.heartbeats[place]
        task = RankTask(rank, os.getpid(), job.forks, log, listener if rank == 0 else None, stdin, beats)
        channel, rank_channel = context.Pipe()
        process = context.Process(target=run_rank, args=(entry, task, rank_channel), name=f"rank-{rank}")
        identity = RankEnvironment(rank, job.size, place, ranks, _LOOPBACK, port).variables()
        variables = {**share, **network, **job.section.environment, **identity, LAUNCHER: str(os.getpid())}
        with set_environment(variables), safe_interpreters():
            process.start()
        rank_channel.close()
        begun.members.append(RankProcess(process, channel, beats))
    if stdin is not None:
        os.close(stdin)


@contextlib.contextmanager
def _store_listener(job: Ranks) -> Iterator[socket.socket | None]:
    """Yield the socket where the ranks' store will listen; None if rank 0 is on another host.

    It is closed here once rank 0 has it: if that rank dies, its peers' connections must break.
    """
    if job.first > 0:
        yield None
        return
    try:
        listener = socket.create_server((_LOOPBACK, job.section.port), backlog=max(128, 2 * job.size))
    except OSError as error:
        message = f"can't listen on port {job.section.port} ({os.strerror(error.errno or 0)}); 0 takes any free port"
        raise ConfigError(Problem("", "launch.port", message)) from None
    with listener:
        yield listener
        if job.hosts is not None:  # once, and only for ranks that could be started
            job.hosts.open_store(listener.getsockname()[1])
